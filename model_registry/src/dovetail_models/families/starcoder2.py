"""StarCoder 2. Source: Lozhkov et al. 2024, arXiv:2402.19173."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.interfaces.model import WeightMapping
from dovetail_models.config_reader import (
    Config,
    read_choice,
    read_count,
    read_flag,
    read_num_layers,
    read_number,
)
from dovetail_models.decoder import (
    AttentionOptions,
    DecoderForCausalLM,
    DecoderShape,
    PlainMLP,
    layer_norm,
    read_decoder_shape,
)
from dovetail_models.decoder.names import at_layer
from dovetail_models.decoder.shape import GELU_TANH_NAMES


class Starcoder2ForCausalLM(DecoderForCausalLM):
    """StarCoder 2: layer norms, a tanh GELU without a gate, biases, an optional window."""

    architectures: ClassVar[tuple[str, ...]] = ("Starcoder2ForCausalLM",)
    example_config: ClassVar[Mapping[str, Any]] = {"hidden_act": "gelu_pytorch_tanh"}

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        bias = read_flag(config, "use_bias", default=True)
        has_window = config.get("sliding_window") is not None
        window = read_count(config, "sliding_window") if has_window else 0
        return read_decoder_shape(
            config,
            windows=(window,) * read_num_layers(config),
            norm=layer_norm(read_number(config, "norm_epsilon", 1e-5)),
            activation=read_choice(config, "hidden_act", (*GELU_TANH_NAMES, "gelu")),
            tied=read_flag(config, "tie_word_embeddings", default=True),
            mlp=PlainMLP,
            mlp_bias=bias,
            attention=AttentionOptions(qkv_bias=bias, output_bias=bias),
        )

    def map_weights(self, shape: DecoderShape) -> Sequence[WeightMapping]:
        """Return the weight mappings."""
        names = {"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}
        return tuple(at_layer("model.layers.{}", names))
