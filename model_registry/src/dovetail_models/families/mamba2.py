"""Mamba 2: layers with a state space instead of attention. Source: Dao and Gu 2024, 2405.21060."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dovetail.errors import ModelError
from dovetail.interfaces.model import AttentionContext, ModelContext, StateTensor, WeightMapping
from dovetail.interfaces.ops import LinearAttentionInputs
from dovetail.value_checks import shorten
from dovetail_models.config_reader import (
    Config,
    read_choice,
    read_count,
    read_flag,
    read_num_layers,
    read_number,
    reject,
    renamed,
)
from dovetail_models.decoder import DecoderForCausalLM, DecoderShape, read_decoder_shape, rms_norm
from dovetail_models.decoder.blocks import BranchBlock
from dovetail_models.decoder.names import LAYER, at_layer, at_root
from dovetail_models.decoder.shape import MAX_HEAD_SIZE, SILU_NAMES
from dovetail_models.decoder.state_branch import (
    MAX_KERNEL_SIZE,
    RATES,
    GatedGroupNorm,
    StateBranch,
    check_sizes,
    head_parameter,
    shard_groups,
    shard_heads,
    times,
)
from dovetail_torch.layers import (
    CausalConv,
    HeadShape,
    ParallelLinear,
    RowParallelLinear,
    StateLayer,
)

MAX_STEP = 1e30
"""The largest finite limit of time steps. A larger one is treated as an error in the file."""
_INFINITY = {"__float__": "Infinity"}
"""How transformers writes infinity to config.json."""
_PARTS = ("z", "x", "b", "c", "dt")
"""The outputs of the input projection: gate, values, keys, queries and time steps."""


@dataclass(frozen=True, kw_only=True)
class Mamba2Options:
    """The sizes of a layer.

    num_groups: groups of heads with the same keys and queries. limits: the bounds of the time step.
    """

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    kernel_size: int
    bias: bool
    conv_bias: bool
    eps: float
    limits: tuple[float, float]


class Mamba2ForCausalLM(DecoderForCausalLM):
    """Mamba 2."""

    architectures: ClassVar[tuple[str, ...]] = ("Mamba2ForCausalLM",)
    lacks: ClassVar[frozenset[str]] = frozenset({"positions"})
    example_config: ClassVar[Mapping[str, Any]] = {
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 2,
        "state_size": 16,
    }

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        config = renamed(config, rms_norm_eps="layer_norm_epsilon")
        options = _read_options(config)
        inner_size = options.num_heads * options.head_size
        return read_decoder_shape(
            config,
            intermediate_size=inner_size,
            heads=HeadShape(num_heads=1, num_kv_heads=1, head_size=1),
            windows=(0,) * read_num_layers(config),
            rope=None,
            norm=rms_norm(options.eps),
            block=BranchBlock,
            make_attention=lambda context, name, shape, rotary, index: Mamba2Mixer(
                context, name, shape, index, options
            ),
            mappings=_mappings(),
        )


class Mamba2Mixer(StateBranch):
    """A state-space layer: projections, a convolution, and a state that decays with each token.

    A_log: the rates -exp(A_log), which the loader computes. Dimensions: T tokens, D hidden size,
    I features of all heads, H heads, P head size, G groups, N state size.
    """

    converts = RATES

    def __init__(
        self,
        context: ModelContext,
        name: str,
        shape: DecoderShape,
        index: int,
        options: Mamba2Options,
    ) -> None:
        super().__init__()
        heads = shard_heads(options.num_heads, context, name)
        groups = shard_groups(options.num_groups, context, name)
        inner, states = times(heads, options.head_size), times(groups, options.state_size)
        sizes = dict(zip(_PARTS, (inner, inner, states, states, heads), strict=True))
        self.in_proj = ParallelLinear(
            context, f"{name}.in_proj", shape.hidden_size, sizes, bias=options.bias
        )
        channels = {part: sizes[part] for part in ("x", "b", "c")}
        self.conv1d = CausalConv(context, channels, options.kernel_size, bias=options.conv_bias)
        self.A_log, self.D, self.dt_bias = (head_parameter(context, heads) for _ in range(3))
        self.shards = dict.fromkeys(("A_log", "D", "dt_bias"), heads)
        self.norm = GatedGroupNorm(context, inner, groups, options.eps)
        self.o_proj = RowParallelLinear(
            context, f"{name}.o_proj", inner.whole, shape.hidden_size, bias=options.bias
        )
        state = StateTensor(
            (heads.size, options.state_size, options.head_size), torch.float32, context.device
        )
        self.attn = StateLayer(index, (self.conv1d.state, state))
        self.sizes = [inner.size, inner.size + 2 * states.size, heads.size]
        self.head_size, self.state_size = options.head_size, options.state_size
        self.limits, self.ops = options.limits, context.ops

    def forward(
        self, x_TD: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the features of all heads, [T, I], before `o_proj`."""
        gate_TI, x_TC, steps_TH = self.in_proj(x_TD).split(self.sizes, dim=-1)
        state = self.attn(attention)
        x_TC = self.conv1d(x_TC, state.tensors[0], state.parts)
        x_TI, keys, queries = self.conv1d.split(x_TC)
        inputs = LinearAttentionInputs(
            q_TGK=queries.unflatten(-1, (-1, self.state_size)),
            k_TGK=keys.unflatten(-1, (-1, self.state_size)),
            v_THV=x_TI.unflatten(-1, (-1, self.head_size)),
            steps_TH=steps_TH,
            step_bias_H=self.dt_bias,
            step_limits=self.limits,
            rates_H=self.A_log,
            skip_H=self.D,
        )
        y_THP = self.ops.linear_attention(inputs, state.tensors[1], state.parts)
        y_TI: torch.Tensor = self.norm(y_THP.flatten(1), gate_TI)
        return y_TI


def _read_options(config: Config) -> Mamba2Options:
    read_choice(config, "hidden_act", SILU_NAMES)
    reject(config, "rescale_prenorm_residual")
    options = Mamba2Options(
        num_heads=read_count(config, "num_heads", 128),
        head_size=read_count(config, "head_dim", 64),
        num_groups=read_count(config, "n_groups", 8),
        state_size=read_count(config, "state_size", 128),
        kernel_size=read_count(config, "conv_kernel", 4, minimum=2),
        bias=read_flag(config, "use_bias"),
        conv_bias=read_flag(config, "use_conv_bias", default=True),
        eps=read_number(config, "rms_norm_eps", 1e-5),
        limits=_read_limits(config),
    )
    hidden_size, expand = read_count(config, "hidden_size"), read_count(config, "expand", 2)
    inner_size = options.num_heads * options.head_size
    if hidden_size * expand != inner_size:
        raise ModelError(
            f"config.json: hidden_size {hidden_size} times expand {expand} must equal num_heads "
            f"{options.num_heads} times head_dim {options.head_size}"
        )
    if options.num_heads % options.num_groups:
        raise ModelError(
            f"config.json: num_heads {options.num_heads} is not a multiple of n_groups "
            f"{options.num_groups}"
        )
    check_sizes({"head_dim": options.head_size, "state_size": options.state_size}, MAX_HEAD_SIZE)
    check_sizes({"conv_kernel": options.kernel_size}, MAX_KERNEL_SIZE)
    return options


def _read_limits(config: Config) -> tuple[float, float]:
    """Return time_step_limit: the minimum and maximum of a time step."""
    stated = config.get("time_step_limit")
    if stated is None:
        return 0.0, math.inf
    is_pair = isinstance(stated, list | tuple) and len(stated) == 2
    if is_pair and stated[1] == _INFINITY:
        stated = (stated[0], math.inf)
    if not is_pair or not all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in stated
    ):
        raise ModelError(
            f"config.json: time_step_limit is {shorten(stated)}; it must be a list of two numbers"
        )
    low, high = stated
    # The values are compared before they are converted: float() fails for a large integer.
    if not 0 <= low < high or low > MAX_STEP or (high != math.inf and high > MAX_STEP):
        raise ModelError(
            f"config.json: time_step_limit is {shorten(stated)}; its values must be non-negative "
            "and ascending"
        )
    return float(low), float(high)


def _mappings() -> tuple[WeightMapping, ...]:
    """Return the names of Mamba's checkpoints."""
    mixer = "backbone.layers.{}.mixer"
    targets = tuple(f"{LAYER}.self_attn.{part}" for part in _PARTS)
    return (
        WeightMapping(source=f"{mixer}.in_proj", targets=targets),
        WeightMapping(
            source=f"{mixer}.conv1d",
            targets=tuple(f"{LAYER}.self_attn.conv1d.{part}" for part in ("x", "b", "c")),
        ),
        *at_layer(
            "backbone.layers.{}",
            {
                "mixer.out_proj": "self_attn.o_proj",
                "mixer": "self_attn",
                "norm": "input_layernorm",
            },
        ),
        *at_root(
            {
                "backbone.embeddings": "model.embed_tokens",
                "backbone.embedding": "model.embed_tokens",
                "backbone.norm_f": "model.norm",
            }
        ),
    )
