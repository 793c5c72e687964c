"""What config.json defines about a dense decoder: sizes, and the choice of each part.

`read_decoder_shape` reads the usual fields with the defaults of Llama; a family passes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from dovetail.errors import ModelError
from dovetail.interfaces.model import ModelContext, WeightMapping
from dovetail.value_checks import shorten
from dovetail_models.config_reader import (
    Config,
    own_name,
    read_choice,
    read_count,
    read_flag,
    read_num_layers,
    read_number,
)
from dovetail_models.decoder.norms import MakeHeadNorm, MakeNorm, rms_norm
from dovetail_torch.layers import ACTIVATIONS, HeadShape
from dovetail_torch.layers.rope_frequencies import DEFAULT_THETA, read_rope_parameters

if TYPE_CHECKING:
    from dovetail_models.decoder.attention import AttentionBranch
    from dovetail_models.decoder.blocks import Block
    from dovetail_torch.layers import RotaryEmbedding

MAX_HEAD_SIZE = 2**13
"""The maximum head size. The largest heads of known models have 512 features, so a larger size is
treated as an error in the file."""
SILU_NAMES = ("silu", "swish")
"""The names of x · sigmoid(x) in the table ACT2FN of the transformers library."""
GELU_TANH_NAMES = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
"""The names of the tanh approximation of GELU."""


MakeMLP = Callable[[ModelContext, str, "DecoderShape"], nn.Module]
"""Makes the MLP of a layer from its path in the model and the shape."""

MakeAttention = Callable[
    [ModelContext, str, "DecoderShape", "RotaryEmbedding | None", int], "AttentionBranch"
]
"""Makes the attention of a layer from its path, the shape, the rotary embedding and the index."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions: parameters as `read_rope_parameters` returns them, and rotary_dim."""

    parameters: Mapping[str, Any]
    rotary_dim: int


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The options in which the attention layers of the families differ.

    scale: the score multiplier; 0 for head_size ** -0.5. soft_cap: c in c·tanh(score / c), 0 for
    none. clip: the projected q, k and v are limited to ±clip; 0 for none. clips_normal: whether q
    and k are limited after their norms. qk_norm: makes the norms of queries and keys; None for
    none. alibi_slopes: one for each query head; () for none.
    bidirectional: whether tokens attend to later tokens. sinks: whether each head has a learned
    logit without a value (Xiao et al. 2023, arXiv:2309.17453).
    """

    qkv_bias: bool = False
    output_bias: bool = False
    scale: float = 0.0
    soft_cap: float = 0.0
    clip: float = 0.0
    qk_norm: MakeHeadNorm | None = None
    alibi_slopes: tuple[float, ...] = ()
    bidirectional: bool = False
    clips_normal: bool = False
    sinks: bool = False


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """The sizes and parts of a decoder.

    windows: the sliding window of each layer in tokens, including the current one; 0 for full
    attention. ropes: the rotary positions of each layer, None for none. norm: makes a norm over a
    number of features. activation: its name in `ACTIVATIONS`. block, mlp: classes of a layer's
    parts; None for the defaults, `PreNormBlock` and `GatedMLP`. mlps: the factory for each layer's
    MLP instead of `mlp`, if they differ; () if not. make_attention: makes the attention of a layer;
    None for `SelfAttention`. mappings: names and layouts of weights that config.json defines.
    num_experts: of a layer; 0 for none.
    embedding_scale: multiplier of the embeddings. logit_scale: multiplier of the logits. logit_cap:
    c in c·tanh(logit / c), 0 for none. branch_scale: multiplier of the outputs of attention and of
    the MLP.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: HeadShape
    windows: tuple[int, ...]
    ropes: tuple[Rope | None, ...]
    tied: bool
    norm: MakeNorm
    activation: str
    attention: AttentionOptions = field(default_factory=AttentionOptions)
    mlp_bias: bool = False
    head_bias: bool = False
    block: type[Block] | None = None
    mlp: MakeMLP | None = None
    mlps: tuple[MakeMLP, ...] = ()
    make_attention: MakeAttention | None = None
    mappings: tuple[WeightMapping, ...] = ()
    num_experts: int = 0
    embedding_scale: float = 1.0
    branch_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.windows)


def read_decoder_shape(config: Config, **changes: Any) -> DecoderShape:
    """Return the shape defined by config.json, with the usual names of fields.

    changes: fields of `DecoderShape` that the family reads itself. Instead of `ropes` it may pass
    `rope`, the same for all layers, or None for no rotary positions.
    Raises ModelError, naming the field, for a value that is absent, invalid or not supported.
    """
    readers: Mapping[str, Callable[[], Any]] = {
        "activation": lambda: read_choice(
            config, "hidden_act", SILU_NAMES if "num_experts" in changes else tuple(ACTIVATIONS)
        ),
        "vocab_size": lambda: read_count(config, "vocab_size"),
        "hidden_size": lambda: read_count(config, "hidden_size"),
        "intermediate_size": lambda: read_count(config, "intermediate_size"),
        "heads": lambda: read_heads(config),
        "windows": lambda: (0,) * read_num_layers(config),
        "norm": lambda: rms_norm(read_number(config, "rms_norm_eps", 1e-6)),
        "tied": lambda: read_flag(config, "tie_word_embeddings"),
    }
    fields = {name: read() for name, read in readers.items() if name not in changes} | changes
    if "ropes" not in fields:
        if "rope" not in fields:
            fields["rope"] = read_rope(config, fields["heads"].head_size, whole_heads=True)
        fields["ropes"] = (fields.pop("rope"),) * len(fields["windows"])
    return DecoderShape(**fields)


def read_heads(
    config: Config, *, kv_field: str = "num_key_value_heads", head_size: int = 0
) -> HeadShape:
    """Return the head counts and the head size. head_size: the default of head_dim."""
    hidden_size = read_count(config, "hidden_size")
    num_heads = read_count(config, "num_attention_heads")
    num_kv_heads = read_count(config, kv_field, num_heads)
    size_name, heads_name, kv_name = (
        own_name(config, field) for field in ("hidden_size", "num_attention_heads", kv_field)
    )
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: {heads_name} {num_heads} is not a multiple of {kv_name} {num_kv_heads}"
        )
    if config.get("head_dim") is None and not head_size and hidden_size % num_heads:
        raise ModelError(
            f"config.json: {size_name} {hidden_size} is not a multiple of {heads_name} "
            f"{num_heads}, and head_dim is absent"
        )
    head_size = read_count(config, "head_dim", head_size or hidden_size // num_heads)
    if head_size > MAX_HEAD_SIZE:
        raise ModelError(
            f"config.json: the head size is {head_size} (head_dim, or {size_name} {hidden_size} / "
            f"{heads_name} {num_heads}); at most {MAX_HEAD_SIZE} is supported"
        )
    return HeadShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size)


def read_rope(
    config: Config,
    head_size: int,
    *,
    layer_type: str = "",
    theta: float = DEFAULT_THETA,
    share: float = 1.0,
    whole_heads: bool = False,
) -> Rope:
    """Return the rotary positions. theta, share: the defaults of the family.

    layer_type: the type of layer, if the parameters differ by type.
    whole_heads: whether the architecture rotates whole heads. As in transformers, rope type
    "default" then ignores partial_rotary_factor; for types other than "default" and
    "proportional", a factor other than 1 raises ModelError.
    """
    parameters = read_rope_parameters(
        config, layer_type=layer_type, default_theta=theta, default_share=share
    )
    share, kind = parameters["partial_rotary_factor"], parameters["rope_type"]
    if kind == "proportional" or (whole_heads and kind == "default"):
        return Rope(parameters=parameters, rotary_dim=head_size)
    rotary_dim = int(head_size * share)
    if whole_heads and rotary_dim != head_size:
        raise ModelError(
            f"config.json: partial_rotary_factor is {share!r} with rope type {kind!r}, but this "
            "architecture rotates whole heads: remove partial_rotary_factor"
        )
    return Rope(parameters=parameters, rotary_dim=rotary_dim)


def read_rotary_layers(config: Config) -> list[bool]:
    """Return whether each layer has RoPE. In `no_rope_layers`, 1 means RoPE and 0 means none."""
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
