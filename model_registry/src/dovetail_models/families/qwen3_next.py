"""Qwen3-Next: gated delta nets, and gated attention in every fourth layer.

Sources: Yang et al. 2024, arXiv:2412.06464 (gated delta net); the reference code of Qwen3-Next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dovetail.errors import ModelError
from dovetail.interfaces.model import AttentionContext, ModelContext, StateTensor, WeightMapping
from dovetail.interfaces.ops import LinearAttentionInputs
from dovetail.value_checks import shorten
from dovetail_models.config_reader import (
    Config,
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
    norm_of_each_head,
    offset_rms_norm,
    read_decoder_shape,
    read_heads,
    read_rope,
)
from dovetail_models.decoder.attention import AttentionBranch
from dovetail_models.decoder.names import LAYER, stacked_experts
from dovetail_models.decoder.shape import MAX_HEAD_SIZE
from dovetail_models.decoder.state_branch import (
    MAX_KERNEL_SIZE,
    RATES,
    StateBranch,
    check_sizes,
    head_parameter,
    shard_heads,
    times,
)
from dovetail_models.families.qwen_moe import EXAMPLE_CONFIG, read_qwen_experts
from dovetail_torch.layers import (
    CausalConv,
    ColumnParallelLinear,
    ParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    StateLayer,
)

FULL, LINEAR = "full_attention", "linear_attention"
_EPS = 1e-6
"""Added to the sum of squares of a query or key before the square root."""


@dataclass(frozen=True, kw_only=True)
class DeltaNetOptions:
    """The sizes of a gated delta net. num_heads: heads of values, a multiple of num_key_heads."""

    num_key_heads: int
    num_heads: int
    key_size: int
    value_size: int
    kernel_size: int
    eps: float


class Qwen3NextForCausalLM(DecoderForCausalLM):
    """Qwen3-Next."""

    architectures: ClassVar[tuple[str, ...]] = ("Qwen3NextForCausalLM",)
    example_config: ClassVar[Mapping[str, Any]] = {
        **EXAMPLE_CONFIG,
        "shared_expert_intermediate_size": 40,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "full_attention_interval": 2,
    }

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        norm = offset_rms_norm(read_number(config, "rms_norm_eps", 1e-6))
        bias = read_flag(config, "attention_bias")
        kinds, options = _read_layer_types(config), _read_options(config)
        heads = read_heads(config, head_size=256)
        shared_size = read_count(config, "shared_expert_intermediate_size", 512)

        def make_branch(
            context: ModelContext,
            name: str,
            shape: DecoderShape,
            rotary: RotaryEmbedding | None,
            index: int,
        ) -> AttentionBranch:
            if kinds[index] == FULL:
                return GatedSelfAttention(context, name, shape, rotary, index)
            return GatedDeltaNet(context, name, shape, index, options)

        return read_decoder_shape(
            config,
            heads=heads,
            windows=(0,) * len(kinds),
            norm=norm,
            rope=read_rope(config, heads.head_size, share=0.25),
            attention=AttentionOptions(
                qkv_bias=bias, output_bias=bias, qk_norm=norm_of_each_head(norm)
            ),
            make_attention=make_branch,
            mappings=_mappings(options, heads.num_heads, kinds),
            **read_qwen_experts(
                config, defaults=(512, 10, 512), shared_size=shared_size, renormalize=True
            ),
        )

    def map_weights(self, shape: DecoderShape) -> Sequence[WeightMapping]:
        """Return the names in the checkpoint, which transformers uses too."""
        return (
            *shape.mappings,
            *stacked_experts("model.layers.{}.mlp.experts", shape.num_experts),
        )


class GatedSelfAttention(SelfAttention):
    """Attention whose output is multiplied by a sigmoid gate of the token, elementwise."""

    def __init__(
        self,
        context: ModelContext,
        name: str,
        shape: DecoderShape,
        rotary: RotaryEmbedding | None,
        index: int,
    ) -> None:
        super().__init__(context, name, shape, rotary, index)
        self.gate_proj = ColumnParallelLinear(
            context,
            f"{name}.gate_proj",
            shape.hidden_size,
            shape.heads.num_heads * shape.heads.head_size,
            bias=shape.attention.qkv_bias,
        )
        self.ops = context.ops

    def forward(
        self, x_TD: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the gated attention of the heads, [T, O], before `o_proj`."""
        gate_TO = self.gate_proj(x_TD)
        attended_TO = super().forward(x_TD, positions_T, attention)
        return self.ops.sigmoid_and_mul(attended_TO, gate_TO)


class GatedDeltaNet(StateBranch):
    """Linear attention whose state decays and is corrected by the delta rule.

    A_log: the rates -exp(A_log), which the loader computes. Dimensions: T tokens, D hidden size,
    C channels, H heads of values, G heads of keys, K and V features of a key and of a value.
    """

    converts = RATES

    def __init__(
        self,
        context: ModelContext,
        name: str,
        shape: DecoderShape,
        index: int,
        options: DeltaNetOptions,
    ) -> None:
        super().__init__()
        groups = shard_heads(options.num_key_heads, context, name)
        heads = times(groups, options.num_heads // options.num_key_heads)
        keys, values = times(groups, options.key_size), times(heads, options.value_size)
        channels = {"q": keys, "k": keys, "v": values}
        outputs = {**channels, "z": values, "b": heads, "a": heads}
        self.in_proj = ParallelLinear(context, f"{name}.in_proj", shape.hidden_size, outputs)
        self.conv1d = CausalConv(context, channels, options.kernel_size, bias=False)
        self.A_log, self.dt_bias = (head_parameter(context, heads) for _ in range(2))
        self.shards = dict.fromkeys(("A_log", "dt_bias"), heads)
        self.norm = RMSNorm(context, options.value_size, options.eps)
        self.o_proj = RowParallelLinear(context, f"{name}.o_proj", values.whole, shape.hidden_size)
        state_shape = (heads.size, options.key_size, options.value_size)
        state = StateTensor(state_shape, torch.float32, context.device)
        self.attn = StateLayer(index, (self.conv1d.state, state))
        self.sizes = [2 * keys.size + values.size, values.size, heads.size, heads.size]
        self.key_size, self.value_size, self.ops = options.key_size, options.value_size, context.ops

    def forward(
        self, x_TD: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the features of all heads, [T, H·V], before `o_proj`."""
        x_TC, gate, beta_TH, steps_TH = self.in_proj(x_TD).split(self.sizes, dim=-1)
        state = self.attn(attention)
        x_TC = self.conv1d(x_TC, state.tensors[0], state.parts)
        q, k, v = self.conv1d.split(x_TC)
        inputs = LinearAttentionInputs(
            q_TGK=q.unflatten(-1, (-1, self.key_size)),
            k_TGK=k.unflatten(-1, (-1, self.key_size)),
            v_THV=v.unflatten(-1, (-1, self.value_size)),
            steps_TH=steps_TH,
            step_bias_H=self.dt_bias,
            rates_H=self.A_log,
            beta_TH=beta_TH,
            key_eps=_EPS,
        )
        y_THV = self.ops.linear_attention(inputs, state.tensors[1], state.parts)
        gate_THV = gate.unflatten(-1, (-1, self.value_size))
        norm = self.norm
        y_THV = self.ops.gated_rms_norm(y_THV, gate_THV, norm.weight, norm.eps, norm_first=True)
        return y_THV.flatten(1)


def _read_options(config: Config) -> DeltaNetOptions:
    options = DeltaNetOptions(
        num_key_heads=read_count(config, "linear_num_key_heads", 16),
        num_heads=read_count(config, "linear_num_value_heads", 32),
        key_size=read_count(config, "linear_key_head_dim", 128),
        value_size=read_count(config, "linear_value_head_dim", 128),
        kernel_size=read_count(config, "linear_conv_kernel_dim", 4, minimum=2),
        eps=read_number(config, "rms_norm_eps", 1e-6),
    )
    if options.num_heads % options.num_key_heads:
        raise ModelError(
            f"config.json: linear_num_value_heads {options.num_heads} is not a multiple of "
            f"linear_num_key_heads {options.num_key_heads}"
        )
    heads = {"key": options.key_size, "value": options.value_size}
    check_sizes({f"linear_{kind}_head_dim": size for kind, size in heads.items()}, MAX_HEAD_SIZE)
    check_sizes({"linear_conv_kernel_dim": options.kernel_size}, MAX_KERNEL_SIZE)
    return options


def _read_layer_types(config: Config) -> tuple[str, ...]:
    """Return the type of each layer; every fourth one has full attention by default."""
    num_layers = read_num_layers(config)
    stated = config.get("layer_types")
    if stated is None:
        interval = read_count(config, "full_attention_interval", 4)
        return tuple(LINEAR if n % interval else FULL for n in range(1, num_layers + 1))
    is_list = isinstance(stated, list | tuple) and len(stated) == num_layers
    if not is_list or any(kind not in (FULL, LINEAR) for kind in stated):
        raise ModelError(
            f"config.json: layer_types is {shorten(stated)}; it must be a list of {num_layers} "
            f"values, each {FULL} or {LINEAR}"
        )
    return tuple(stated)


def _mappings(
    options: DeltaNetOptions, num_heads: int, kinds: Sequence[str]
) -> tuple[WeightMapping, ...]:
    """Return the mappings of gated delta nets and gated attention.

    num_heads: query heads of attention. kinds: the type of each layer; both types have an `o_proj`.
    """
    own, net = f"{LAYER}.self_attn", f"{LAYER}.linear_attn"

    def parts(names: str, module: str = own) -> tuple[str, ...]:
        return tuple(f"{module}.{name}" for name in names)

    groups = options.num_key_heads
    return (
        WeightMapping(source=f"{net}.in_proj_qkvz", targets=parts("qkvz"), groups=groups),
        WeightMapping(source=f"{net}.in_proj_ba", targets=parts("ba"), groups=groups),
        WeightMapping(source=f"{net}.conv1d", targets=parts("qkv", f"{own}.conv1d")),
        *(
            WeightMapping(source=f"{net}.{name}", targets=(f"{own}.{name}",))
            for name in ("A_log", "dt_bias", "norm")
        ),
        *(
            WeightMapping(
                source=f"{net}.out_proj".format(index), targets=(f"{own}.o_proj".format(index),)
            )
            for index, kind in enumerate(kinds)
            if kind == LINEAR
        ),
        WeightMapping(
            source=f"{own}.q_proj", targets=(f"{own}.q_proj", f"{own}.gate_proj"), groups=num_heads
        ),
        WeightMapping(source="mtp"),  # multi-token prediction: not loaded
    )
