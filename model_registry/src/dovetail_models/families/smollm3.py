"""SmolLM 3. Source: Bakouch et al. 2025, "SmolLM3: smol, multilingual, long-context reasoner"."""

from __future__ import annotations

from typing import ClassVar

from dovetail.errors import ModelError
from dovetail.value_checks import shorten
from dovetail_models.config_reader import Config, read_count, read_flag, read_num_layers
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderForCausalLM,
    DecoderShape,
    read_decoder_shape,
    read_heads,
    read_rope,
)
from dovetail_models.sliding_windows import read_windows_of


class SmolLM3ForCausalLM(DecoderForCausalLM):
    """Llama without rotary positions in every fourth layer (Yang et al. 2025, arXiv:2501.18795)."""

    architectures: ClassVar[tuple[str, ...]] = ("SmolLM3ForCausalLM",)

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        bias = read_flag(config, "attention_bias")
        is_rotary = _read_rotary_layers(config)
        size = read_heads(config).head_size
        rope = read_rope(config, size, theta=2_000_000.0, whole_heads=True)
        return read_decoder_shape(
            config,
            windows=_read_windows(config, is_rotary),
            ropes=tuple(rope if rotary else None for rotary in is_rotary),
            tied=read_flag(config, "tie_word_embeddings", default=True),
            mlp_bias=read_flag(config, "mlp_bias"),
            attention=AttentionOptions(qkv_bias=bias, output_bias=bias),
        )


def _read_rotary_layers(config: Config) -> list[bool]:
    """Return whether each layer has rotary positions. `no_rope_layers` has 1 where it does."""
    num_layers = read_num_layers(config)
    stated = config.get("no_rope_layers")
    if stated is None:
        interval = read_count(config, "no_rope_layer_interval", 4)
        return [number % interval != 0 for number in range(1, num_layers + 1)]
    is_list = isinstance(stated, list | tuple) and len(stated) == num_layers
    if not is_list or any(value not in (0, 1) for value in stated):
        raise ModelError(
            f"config.json: no_rope_layers is {shorten(stated)}; it must be a list of {num_layers} "
            "values, each 0 or 1"
        )
    return [bool(value) for value in stated]


def _read_windows(config: Config, is_rotary: list[bool]) -> tuple[int, ...]:
    if not read_flag(config, "use_sliding_window") or config.get("sliding_window") is None:
        return (0,) * len(is_rotary)
    stated = config.get("layer_types")
    kinds = stated or ["full_attention" if item else "sliding_attention" for item in is_rotary]
    return read_windows_of(config, kinds)
