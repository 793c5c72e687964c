"""Architectures with recurrent layers: fields of config.json, names and values of tensors.

Source: https://github.com/ggml-org/llama.cpp, `convert_hf_to_gguf.py` and `src/models`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from dovetail.errors import ModelError, WeightError
from dovetail.interfaces import WeightMapping
from dovetail_gguf.metadata_fields import Fields

if TYPE_CHECKING:
    import torch

Config = dict[str, Any]

MAX_PREDICTION_LAYERS = 64
"""The maximum number of multi-token-prediction layers, each of which has a weight mapping."""
FULL, LINEAR = "full_attention", "linear_attention"
_ATTENTION = "model.layers.{}.self_attn"
_DECAY = ".ssm_a"
"""Suffix of the names of tensors that store -exp(A_log)."""
_RESHAPED = (_DECAY, ".ssm_d", ".ssm_conv1d.weight", ".ssm_norm.weight")
"""Suffixes of tensors that have more or fewer dimensions in a file than in the model."""
_PLAIN_NORM = ".ssm_norm.weight"
"""Suffixes of norms to whose weights the converter adds nothing."""


def read_mamba2(fields: Fields, config: Config) -> None:
    """Read the fields of Mamba 2, which has no attention. Files do not state time-step limits."""
    _check_layers(fields, config)
    inner, num_heads, num_groups = _read_sizes(fields)
    hidden = max(1, config["hidden_size"])
    if inner % hidden:
        raise ModelError(
            f"{fields.file.path}: {fields.name}.ssm.inner_size {inner} is not a multiple of "
            f"{fields.name}.embedding_length {hidden}."
        )
    for name in ("num_attention_heads", "num_key_value_heads", "rope_theta", "intermediate_size"):
        del config[name]
    config |= {
        "num_heads": num_heads,
        "head_dim": inner // num_heads,
        "n_groups": num_groups,
        "state_size": fields.integer("ssm.state_size", minimum=1),
        "conv_kernel": fields.integer("ssm.conv_kernel", minimum=1),
        "expand": inner // hidden,
        "layer_norm_epsilon": config.pop("rms_norm_eps"),
        "use_bias": fields.has("ssm_in.bias"),
        "use_conv_bias": fields.has("ssm_conv1d.bias"),
    }


def read_qwen3_next(fields: Fields, config: Config) -> None:
    """Read the fields of Qwen3-Next. Multi-token-prediction layers are not part of the model."""
    num_extra = fields.integer("nextn_predict_layers", default=0, maximum=MAX_PREDICTION_LAYERS)
    config["num_nextn_predict_layers"] = num_extra
    config["num_hidden_layers"] -= min(num_extra, config["num_hidden_layers"])
    _check_layers(fields, config)
    inner, num_heads, num_groups = _read_sizes(fields)
    config |= {
        "layer_types": _layer_types(fields, config["num_hidden_layers"]),
        "linear_num_key_heads": num_groups,
        "linear_num_value_heads": num_heads,
        "linear_key_head_dim": fields.integer("ssm.state_size", minimum=1),
        "linear_value_head_dim": inner // num_heads,
        "linear_conv_kernel_dim": fields.integer("ssm.conv_kernel", minimum=1),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length", minimum=1),
        "shared_expert_intermediate_size": fields.integer(
            "expert_shared_feed_forward_length", minimum=1
        ),
        "norm_topk_prob": fields.flag("expert_weights_norm", default=True),
    }


def _check_layers(fields: Fields, config: Config) -> None:
    """Raise ModelError if a layer is missing, so that the number of tensors bounds the layers."""
    num_layers = config["num_hidden_layers"]
    for layer in chain((num_layers - 1,), range(num_layers)):
        name = f"blk.{layer}.attn_norm.weight"
        if name not in fields.file.tensors:
            raise ModelError(
                f"{fields.file.path} has no tensor {name}, but {fields.name}.block_count states "
                f"{num_layers} layers. The file is incomplete; download it again."
            )


def _read_sizes(fields: Fields) -> tuple[int, int, int]:
    """Return the features of all heads, the number of heads, and the number of groups."""
    inner = fields.integer("ssm.inner_size", minimum=1)
    num_heads = fields.integer("ssm.time_step_rank", minimum=1)
    num_groups = fields.integer("ssm.group_count", minimum=1)
    for key, count, whole, of in (
        ("ssm.inner_size", num_heads, inner, "ssm.time_step_rank"),
        ("ssm.time_step_rank", num_groups, num_heads, "ssm.group_count"),
    ):
        if whole % count:
            raise ModelError(
                f"{fields.file.path}: {fields.name}.{key} {whole} is not a multiple of "
                f"{fields.name}.{of} {count}."
            )
    return inner, num_heads, num_groups


def _layer_types(fields: Fields, num_layers: int) -> list[str]:
    """Return the type of each layer, from a list of flags or from an interval."""
    stated = fields.get("attention.recurrent_layers")
    if stated is None:
        interval = fields.integer("full_attention_interval", default=4, minimum=1)
        return [LINEAR if number % interval else FULL for number in range(1, num_layers + 1)]
    is_list = isinstance(stated, list) and len(stated) >= num_layers
    if not is_list or not all(type(item) in (bool, int) for item in stated):
        raise ModelError(
            f"{fields.file.path}: {fields.name}.attention.recurrent_layers must be a list of "
            f"{num_layers} flags."
        )
    return [LINEAR if item else FULL for item in stated[:num_layers]]


def mamba2_mappings(config: Mapping[str, Any]) -> Iterator[WeightMapping]:
    """Yield the mappings of the layers of Mamba 2."""
    yield WeightMapping(source="blk.{}.ssm_in", targets=_parts("z", "x", "b", "c", "dt"))
    yield from _state_mappings("x", "b", "c")


def qwen3_next_mappings(config: Mapping[str, Any]) -> Iterator[WeightMapping]:
    """Yield the mappings of gated delta nets, of gated attention, and of unused layers."""
    first = config["num_hidden_layers"]
    for number in range(first, first + config["num_nextn_predict_layers"]):
        yield WeightMapping(source=f"blk.{number}")
    groups = config["linear_num_key_heads"]
    yield WeightMapping(source="blk.{}.attn_qkv", targets=_parts("q", "k", "v"))
    yield WeightMapping(source="blk.{}.attn_gate", targets=_parts("z"))
    yield WeightMapping(
        source="blk.{}.ssm_in", targets=_parts("q", "k", "v", "z"), groups=groups
    )  # of files before 2026
    yield WeightMapping(source="blk.{}.ssm_ba", targets=_parts("b", "a"), groups=groups)
    yield from _state_mappings("q", "k", "v")
    yield WeightMapping(
        source="blk.{}.attn_q",
        targets=_parts("q_proj", "gate_proj"),
        groups=config["num_attention_heads"],
    )


def _state_mappings(*channels: str) -> Iterator[WeightMapping]:
    """Yield the mappings of the tensors that both architectures have."""
    convolution = tuple(f"{_ATTENTION}.conv1d.{part}" for part in channels)
    yield WeightMapping(source="blk.{}.ssm_conv1d", targets=convolution)
    for own, name in (
        ("ssm_dt.bias", "dt_bias"),
        ("ssm_a", "A_log"),
        ("ssm_d", "D"),
        ("ssm_norm", "norm"),
        ("ssm_out", "o_proj"),
    ):
        yield WeightMapping(source=f"blk.{{}}.{own}", targets=_parts(name))


def _parts(*names: str) -> tuple[str, ...]:
    return tuple(f"{_ATTENTION}.{name}" for name in names)


def is_reshaped(name: str) -> bool:
    """Return whether the file and the model store this tensor with different shapes."""
    return name.endswith(_RESHAPED)


def has_offset(name: str) -> bool:
    """Return whether the converter adds `Architecture.norm_offset` to a tensor."""
    return name.endswith("norm.weight") and not name.endswith(_PLAIN_NORM)


def is_decay(name: str) -> bool:
    """Return whether a tensor has the values -exp(A_log)."""
    return name.endswith(_DECAY)


def decay_logarithms(values: torch.Tensor, source: str) -> torch.Tensor:
    """Return A_log, given values = -exp(A_log).

    Raises WeightError, naming `source`, if any value is not below 0.
    """
    values = values.float()
    if not bool((values < 0).all()):
        raise WeightError(f"{source} has values that are not below 0: the file is damaged")
    return (-values).log()
