"""RecurrentGemma: gated linear recurrences (RG-LRU), and attention with a window in some layers.

Sources: De et al. 2024, arXiv:2402.19427 (Griffin); Botev et al. 2024, arXiv:2404.07839.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import Any, ClassVar

import torch

from dovetail.errors import ModelError
from dovetail.interfaces.model import ModelContext, WeightMapping
from dovetail.value_checks import shorten
from dovetail_models.config_reader import (
    MAX_LAYERS,
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
    SelfAttention,
    read_heads,
    read_rope,
)
from dovetail_models.decoder.attention import AttentionBranch
from dovetail_models.decoder.gated_recurrence import RecurrenceOptions, RecurrentBranch
from dovetail_models.decoder.names import LAYER, at_layer, at_root
from dovetail_models.decoder.shape import GELU_TANH_NAMES, MAX_HEAD_SIZE
from dovetail_models.decoder.state_branch import MAX_KERNEL_SIZE, check_sizes
from dovetail_models.families.gemma import read_gemma_shape
from dovetail_torch.layers import RotaryEmbedding

RECURRENT, ATTENTION = "recurrent", "attention"


class RecurrentGemmaForCausalLM(DecoderForCausalLM):
    """RecurrentGemma."""

    architectures: ClassVar[tuple[str, ...]] = ("RecurrentGemmaForCausalLM",)
    example_config: ClassVar[Mapping[str, Any]] = {
        "block_types": [RECURRENT, ATTENTION],
        "attention_window_size": 16,
    }

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        kinds, options = _read_kinds(config), _read_options(config)
        heads = read_heads(config)
        window = read_count(config, "attention_window_size", 2048)

        def make_branch(
            context: ModelContext,
            name: str,
            shape: DecoderShape,
            rotary: RotaryEmbedding | None,
            index: int,
        ) -> AttentionBranch:
            if kinds[index] == ATTENTION:
                return SelfAttention(context, name, shape, rotary, index)
            return RecurrentBranch(context, name, shape, index, options)

        # The reference code rounds the scale of the embeddings to bfloat16.
        scale = read_count(config, "hidden_size") ** 0.5
        scale = torch.tensor(scale, dtype=torch.bfloat16, device="cpu").item()
        return read_gemma_shape(
            config,
            heads=heads,
            # The MLP has half of intermediate_size.
            intermediate_size=read_count(config, "intermediate_size", minimum=2) // 2,
            activation=read_choice(config, "hidden_activation", GELU_TANH_NAMES),
            windows=tuple(window if kind == ATTENTION else 0 for kind in kinds),
            rope=read_rope(config, heads.head_size, share=0.5),
            attention=AttentionOptions(
                qkv_bias=read_flag(config, "attention_bias"), output_bias=True
            ),
            mlp_bias=True,
            make_attention=make_branch,
            mappings=_mappings(kinds),
            embedding_scale=scale,
            logit_cap=read_number(config, "logits_soft_cap", 30.0),
        )


def _mappings(kinds: Sequence[str]) -> tuple[WeightMapping, ...]:
    """Return the names in checkpoints. Attention and recurrence name the last layer differently."""
    names = {
        "temporal_block": "self_attn",
        "temporal_pre_norm": "input_layernorm",
        "channel_pre_norm": "post_attention_layernorm",
        "mlp_block": "mlp",
    }
    return (
        *(
            WeightMapping(
                source=f"{LAYER}.temporal_block.linear_out".format(index),
                targets=(f"{LAYER}.self_attn.o_proj".format(index),),
            )
            for index, kind in enumerate(kinds)
            if kind == RECURRENT
        ),
        *at_layer(LAYER, names),
        *at_root({"model.final_norm": "model.norm"}),
    )


def _read_options(config: Config) -> RecurrenceOptions:
    num_heads = read_count(config, "num_attention_heads")
    width = read_count(config, "lru_width", read_count(config, "hidden_size"))
    kernel_size = read_count(config, "conv1d_width", 4, minimum=2)
    if width % num_heads:
        raise ModelError(
            f"config.json: lru_width {width} is not a multiple of num_attention_heads {num_heads}"
        )
    head_size = width // num_heads
    check_sizes({"lru_width / num_attention_heads": head_size}, MAX_HEAD_SIZE)
    check_sizes({"conv1d_width": kernel_size}, MAX_KERNEL_SIZE)
    return RecurrenceOptions(num_heads=num_heads, head_size=head_size, kernel_size=kernel_size)


def _read_kinds(config: Config) -> tuple[str, ...]:
    """Return the type of each layer: block_types, repeated."""
    num_layers = read_num_layers(config)
    stated = config.get("block_types")
    if stated is None:
        stated = (RECURRENT, RECURRENT, ATTENTION)
    is_list = isinstance(stated, list | tuple) and len(stated) > 0
    if is_list and len(stated) > MAX_LAYERS:
        raise ModelError(
            f"config.json: block_types has {len(stated)} values; at most {MAX_LAYERS} are supported"
        )
    if not is_list or any(kind not in (RECURRENT, ATTENTION) for kind in stated):
        raise ModelError(
            f"config.json: block_types is {shorten(stated)}; it must be a list of values, each "
            f"{RECURRENT} or {ATTENTION}"
        )
    return tuple(islice(cycle(stated), num_layers))
