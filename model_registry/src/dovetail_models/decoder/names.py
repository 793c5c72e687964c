"""Names and layouts of weights in checkpoints that differ from those of the modules.

The modules have the names of Llama's checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dovetail.interfaces.model import WeightMapping

LAYER = "model.layers.{}"
"""The modules of a layer."""
_QKV = tuple(f"{LAYER}.self_attn.{part}_proj" for part in "qkv")


def at_layer(source: str, names: Mapping[str, str], **layout: bool) -> Iterator[WeightMapping]:
    """Yield the mapping of each module of a layer. names: the module by the checkpoint's name.

    source: the layer in the checkpoint, such as "transformer.h.{}". layout: fields of
    `WeightMapping`.
    """
    for own, module in names.items():
        yield WeightMapping(source=f"{source}.{own}", targets=(f"{LAYER}.{module}",), **layout)


def fused_qkv(source: str, *, groups: int = 1, transposed: bool = False) -> WeightMapping:
    """Return the mapping of one weight with q, k and v. source: its name in the checkpoint.

    groups: see `WeightMapping`.
    """
    return WeightMapping(source=source, targets=_QKV, groups=groups, transposed=transposed)


def fused_gate_up(source: str) -> WeightMapping:
    """Return the mapping of one weight with gate and up, gate first."""
    targets = (f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj")
    return WeightMapping(source=source, targets=targets)


def stacked_experts(
    source: str, num_experts: int, *, transposed: bool = False
) -> Iterator[WeightMapping]:
    """Yield the mappings of experts whose weights are stacked, as in transformers' modules.

    source: the experts in the checkpoint. transposed: see `WeightMapping`.
    """
    experts = [f"{LAYER}.mlp.experts.{expert}" for expert in range(num_experts)]
    for name, parts in {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.items():
        targets = tuple(f"{expert}.{part}_proj.weight" for expert in experts for part in parts)
        yield WeightMapping(
            source=f"{source}.{name}", targets=targets, stacked=num_experts, transposed=transposed
        )


def interleaved_experts(
    source: str, num_experts: int, intermediate_size: int
) -> Iterator[WeightMapping]:
    """Yield the mappings of stacked, transposed experts with biases, as in gpt-oss.

    source: the experts in the checkpoint. The features of gate and up are interleaved.
    """
    experts = [f"{LAYER}.mlp.experts.{expert}" for expert in range(num_experts)]
    groups = {"gate_up_proj": (intermediate_size, "gate", "up"), "down_proj": (1, "down")}
    for name, (num_groups, *parts) in groups.items():
        for ending, leaf in (("", "weight"), ("_bias", "bias")):
            yield WeightMapping(
                source=f"{source}.{name}{ending}",
                targets=tuple(
                    f"{expert}.{part}_proj.{leaf}" for expert in experts for part in parts
                ),
                groups=num_groups,
                stacked=num_experts,
                transposed=True,
            )


def rotary_pairs(
    head_size: int, rotary_dim: int, names: tuple[str, ...] = ("q_proj", "k_proj")
) -> Iterator[WeightMapping]:
    """Yield the mappings of projections whose rotary features are stored as pairs."""
    for name in names:
        module = f"{LAYER}.self_attn.{name}"
        yield WeightMapping(source=module, targets=(module,), rotary_pairs=(head_size, rotary_dim))


def at_root(names: Mapping[str, str]) -> Iterator[WeightMapping]:
    """Yield the mapping of each module outside of the layers, by the checkpoint's name."""
    for own, module in names.items():
        yield WeightMapping(source=own, targets=(module,))
