"""DeepSeek V2 and V3. Sources: DeepSeek-AI 2024, arXiv:2405.04434 and arXiv:2412.19437."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from dovetail.errors import ModelError
from dovetail.interfaces.model import WeightMapping
from dovetail.interfaces.ops import ExpertRouting
from dovetail_models.config_reader import (
    Config,
    read_choice,
    read_count,
    read_flag,
    read_num_layers,
    read_number,
    read_optional,
    reject,
)
from dovetail_models.decoder import (
    DecoderForCausalLM,
    DecoderShape,
    ExpertOptions,
    GatedMLP,
    LatentOptions,
    Rope,
    latent_attention,
    read_decoder_shape,
    read_rope,
    read_top_k,
    sparse_mlp,
)
from dovetail_models.decoder.experts import check_num_experts
from dovetail_models.decoder.names import LAYER, at_layer, stacked_experts
from dovetail_models.decoder.shape import MAX_HEAD_SIZE

MAX_IGNORED_LAYERS = 64
"""The maximum number of multi-token-prediction layers. These layers are not loaded."""

EXAMPLE_CONFIG: Mapping[str, Any] = {
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
}
"""The fields of a small example configuration."""


class DeepseekV2ForCausalLM(DecoderForCausalLM):
    """DeepSeek V2: softmax over the experts, without renormalized weights."""

    architectures: ClassVar[tuple[str, ...]] = ("DeepseekV2ForCausalLM",)
    example_config: ClassVar[Mapping[str, Any]] = {
        **EXAMPLE_CONFIG,
        "topk_method": "group_limited_greedy",
    }

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        read_choice(config, "scoring_func", ("softmax",))
        reject(config, "rope_interleave", needs=True)
        method = read_choice(config, "topk_method", ("greedy", "group_limited_greedy"))
        reject(config, "norm_topk_prob")
        num_experts = _read_num_experts(config, 64)
        routing = ExpertRouting(
            top_k=read_top_k(config, num_experts),
            scale=read_number(config, "routed_scaling_factor", 1.0),
        )
        if method == "group_limited_greedy":
            routing = _with_groups(config, routing, num_experts)
        return _read_shape(
            config,
            routing,
            num_experts=num_experts,
            defaults={
                "moe_intermediate_size": 1407,
                "n_shared_experts": 2,
                "first_k_dense_replace": 0,
            },
            mlp_bias=read_flag(config, "mlp_bias"),
        )


class DeepseekV3ForCausalLM(DecoderForCausalLM):
    """DeepSeek V3: sigmoid scores with a correction for the selection of experts."""

    architectures: ClassVar[tuple[str, ...]] = ("DeepseekV3ForCausalLM",)
    example_config: ClassVar[Mapping[str, Any]] = EXAMPLE_CONFIG

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        read_choice(config, "scoring_func", ("sigmoid",))
        read_choice(config, "topk_method", ("noaux_tc",))
        num_experts = _read_num_experts(config, 256)
        routing = ExpertRouting(
            top_k=read_top_k(config, num_experts, 8),
            scores="sigmoid",
            renormalize=read_flag(config, "norm_topk_prob", default=True),
            scale=read_number(config, "routed_scaling_factor", 2.5),
        )
        num_ignored = read_count(config, "num_nextn_predict_layers", 1, minimum=0)
        if num_ignored > MAX_IGNORED_LAYERS:
            raise ModelError(
                f"config.json: num_nextn_predict_layers is {num_ignored}; at most "
                f"{MAX_IGNORED_LAYERS} is supported"
            )
        return _read_shape(
            config,
            _with_groups(config, routing, num_experts, defaults=(8, 4), min_size=2),
            num_experts=num_experts,
            defaults={
                "moe_intermediate_size": 2048,
                "n_shared_experts": 1,
                "first_k_dense_replace": 3,
            },
            num_ignored=num_ignored,
        )


def _read_shape(
    config: Config,
    routing: ExpertRouting,
    *,
    num_experts: int,
    defaults: Mapping[str, int],
    num_ignored: int = 0,
    **changes: Any,
) -> DecoderShape:
    """Return the shape that config.json defines, with experts.

    defaults: default values of the fields about experts. changes: further fields of the shape.
    num_ignored: number of multi-token-prediction layers, which follow the decoder layers.
    """
    reject(config, "moe_layer_freq", needs=1)
    expert_size, num_shared, num_dense = (
        read_count(config, field, default, minimum=0 if field != "moe_intermediate_size" else 1)
        for field, default in defaults.items()
    )
    mlp = sparse_mlp(
        ExpertOptions(
            num_experts=num_experts,
            intermediate_size=expert_size,
            routing=routing,
            has_correction=routing.scores == "sigmoid",
            shared_size=num_shared * expert_size,
        )
    )
    num_layers = read_num_layers(config)
    rope = read_rope(config, read_count(config, "qk_rope_head_dim", 64), whole_heads=True)
    options = _read_latent(config, rope)
    return read_decoder_shape(
        config,
        heads=options.heads,
        windows=(0,) * num_layers,
        rope=rope,
        make_attention=latent_attention(options),
        num_experts=num_experts,
        mlps=tuple(GatedMLP if index < num_dense else mlp for index in range(num_layers)),
        mappings=(
            *(WeightMapping(source=LAYER.format(num_layers + n)) for n in range(num_ignored)),
            *at_layer(LAYER, {"mlp.shared_experts": "mlp.shared_expert"}),
            *stacked_experts(f"{LAYER}.mlp.experts", num_experts),
            WeightMapping(  # the keys of a head, then its values
                source=f"{LAYER}.self_attn.kv_b_proj",
                targets=(f"{LAYER}.self_attn.k_b_proj", f"{LAYER}.self_attn.v_b_proj"),
                groups=options.num_heads,
            ),
            *(_rotary_pairs(options) if read_flag(config, "rope_interleave", default=True) else ()),
        ),
        **changes,
    )


def _read_latent(config: Config, rope: Rope) -> LatentOptions:
    """Return the sizes of latent attention.

    If q_lora_rank is null, queries have no latent vector.
    """
    num_heads = read_count(config, "num_attention_heads")
    reject(config, "num_key_value_heads", needs=num_heads)
    has_query_rank = config.get("q_lora_rank", 0) is not None
    plain_size = read_count(config, "qk_nope_head_dim", 128)
    options = LatentOptions(
        num_heads=num_heads,
        query_rank=read_count(config, "q_lora_rank", 1536) if has_query_rank else 0,
        rank=read_count(config, "kv_lora_rank", 512),
        plain_size=plain_size,
        rotary_dim=rope.rotary_dim,
        value_size=read_count(config, "v_head_dim", 128),
        scale=(plain_size + rope.rotary_dim) ** -0.5 * _temperature(rope),
        bias=read_flag(config, "attention_bias"),
    )
    sizes = {
        "kv_lora_rank + qk_rope_head_dim": options.heads.head_size,
        "qk_nope_head_dim": plain_size,
        "v_head_dim": options.value_size,
    }
    for field, size in sizes.items():
        if size > MAX_HEAD_SIZE:
            raise ModelError(
                f"config.json: {field} is {size}; at most {MAX_HEAD_SIZE} is supported"
            )
    return options


def _temperature(rope: Rope) -> float:
    """Return the attention-score multiplier that mscale_all_dim defines for scaled positions."""
    scale = read_optional(rope.parameters, "mscale_all_dim")
    if not scale or rope.parameters["rope_type"] == "default":
        return 1.0
    factor = read_number(rope.parameters, "factor", 0.0)
    return (0.1 * scale * math.log(factor) + 1) ** 2 if factor > 1 else 1.0


def _rotary_pairs(options: LatentOptions) -> Iterator[WeightMapping]:
    """Yield the mappings of projections whose last features are stored as rotary pairs."""
    head_size = options.plain_size + options.rotary_dim
    query = "q_b_proj" if options.query_rank else "q_proj"
    for name, size in {query: head_size, "kv_a_proj_with_mqa": options.heads.head_size}.items():
        module = f"{LAYER}.self_attn.{name}"
        yield WeightMapping(
            source=module,
            targets=(module,),
            rotary_pairs=(size, options.rotary_dim),
            rotary_last=True,
        )


def _read_num_experts(config: Config, default: int) -> int:
    num_experts = read_count(config, "n_routed_experts", default, minimum=2)
    check_num_experts(config, "n_routed_experts", num_experts)
    return num_experts


def _with_groups(
    config: Config,
    routing: ExpertRouting,
    num_experts: int,
    *,
    defaults: tuple[int, int] | tuple[None, None] = (None, None),
    min_size: int = 1,
) -> ExpertRouting:
    """Return `routing` with groups of experts. min_size: minimum number of experts of a group.

    defaults: default values of n_group and topk_group.
    """
    num_groups = read_count(config, "n_group", defaults[0])
    top_groups = read_count(config, "topk_group", defaults[1])
    if num_experts % num_groups or num_experts // num_groups < min_size:
        raise ModelError(
            f"config.json: n_group is {num_groups}, but {num_experts} experts (n_routed_experts) "
            f"cannot be divided into {num_groups} equal groups of at least {min_size}"
        )
    available = top_groups * num_experts // num_groups
    if top_groups > num_groups or routing.top_k > available:
        raise ModelError(
            f"config.json: topk_group is {top_groups} of {num_groups} groups with "
            f"{num_experts // num_groups} experts each; it must be at most n_group, and the groups "
            f"must contain num_experts_per_tok {routing.top_k} experts"
        )
    return replace(routing, num_groups=num_groups, top_groups=top_groups)
