"""Mixtral. Source: Jiang et al. 2024, arXiv:2401.04088."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from dovetail.interfaces.model import WeightMapping
from dovetail.interfaces.ops import ExpertRouting
from dovetail_models.config_reader import Config, read_count, read_num_layers, read_number
from dovetail_models.decoder import (
    DecoderForCausalLM,
    DecoderShape,
    ExpertOptions,
    read_decoder_shape,
    read_num_experts,
    read_top_k,
    rms_norm,
    sparse_mlp,
)
from dovetail_models.decoder.names import at_layer, stacked_experts

LAYER = "model.layers.{}"
PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""The names of an expert's projections in checkpoints of the hub."""


class MixtralForCausalLM(DecoderForCausalLM):
    """Mixtral: Mistral with experts in each layer.

    The weights of a token's experts sum to 1.
    """

    architectures: ClassVar[tuple[str, ...]] = ("MixtralForCausalLM",)
    example_config: ClassVar[Mapping[str, Any]] = {"num_local_experts": 4}

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        num_experts, num_layers = read_num_experts(config, 8), read_num_layers(config)
        has_window = config.get("sliding_window") is not None
        window = read_count(config, "sliding_window") if has_window else 0
        options = ExpertOptions(
            num_experts=num_experts,
            intermediate_size=read_count(config, "intermediate_size"),
            routing=ExpertRouting(top_k=read_top_k(config, num_experts, 2), renormalize=True),
        )
        return read_decoder_shape(
            config,
            windows=(window,) * num_layers,
            norm=rms_norm(read_number(config, "rms_norm_eps", 1e-5)),
            num_experts=num_experts,
            mlp=sparse_mlp(options),
        )

    def map_weights(self, shape: DecoderShape) -> Sequence[WeightMapping]:
        """Return the mappings for the hub's checkpoints and for transformers' module names."""
        return tuple(_names(shape.num_experts))


def _names(num_experts: int) -> Iterator[WeightMapping]:
    moe = f"{LAYER}.block_sparse_moe"
    yield from at_layer(LAYER, {"block_sparse_moe.gate": "mlp.gate"})
    for own, part in PARTS.items():
        target = f"{LAYER}.mlp.experts.{{}}.{part}"
        yield WeightMapping(source=f"{moe}.experts.{{}}.{own}", targets=(target,))
    yield from stacked_experts(f"{LAYER}.mlp.experts", num_experts)
