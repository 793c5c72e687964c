"""The contract of an attention backend: capabilities, metadata builder, layer.

The core compares what a model requires (`AttentionRequirements`) with what a backend declares
(`AttentionCapabilities`) and rejects a backend that does not declare everything required. This
module imports no tensor library; tensors appear in annotations only.

Dimensions: T tokens of the step, R requests of the step, H query heads, K key-value heads,
D head size, B block size, N blocks, M block-table width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail.retired_names import reject_retired

if TYPE_CHECKING:
    import torch

    from dovetail.interfaces.ops import Ops

ROTARY = "rotary"
"""Feature id: the backend's layers can apply RoPE to queries and keys. No model requires it."""

KV_LAYER_SCALES = "kv_layer_scales"
"""Feature id: the backend reads `AttentionLayerContext.kv_scales`."""

MLA = "mla"
"""Feature id: the backend supports `AttentionLayerContext.value_size`."""

SMALL_HEAD_SIZE = 32
"""Heads may always be padded to this size, even if padding more than doubles their size."""


@dataclass(frozen=True, kw_only=True)
class AttentionFacts:
    """The attention features that a model uses.

    sliding_window, soft_cap, sinks, alibi, bidirectional: whether any layer uses this feature.
    mla: whether any layer uses multi-head latent attention (`AttentionLayerContext.value_size`).
    """

    head_size: int
    num_heads: int
    num_kv_heads: int
    sliding_window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    alibi: bool = False
    bidirectional: bool = False
    mla: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionRequirements:
    """What a model on a platform requires of an attention backend.

    dtype, kv_cache_dtype: names such as "bfloat16". device_type: torch's name, such as "cuda".
    architecture: the architecture of an assumed device, such as "sm_90"; "" for this process's
        device.
    features: ids of the required features beyond plain causal attention over a paged cache:
        "sliding_window", "soft_cap", "sinks" (a layer has logits without a value), "alibi" (scores
        have a bias that is linear in the distance), "bidirectional" (tokens attend to later tokens,
        without a cache), "mla" (values are parts of keys), "cascade",
        "batch_invariant" (a token's result is bit-identical for any batch and any chunking of its
        prompt), … A backend must declare every id, so an unknown requirement is rejected.
    """

    device_type: str
    dtype: str
    kv_cache_dtype: str
    head_size: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    features: frozenset[str] = frozenset()
    architecture: str = ""


@dataclass(frozen=True, kw_only=True)
class AttentionCapabilities:
    """What an attention backend supports.

    device_types: empty for any. block_size_multiple: block sizes are multiples of this number.
    head_sizes: empty for any. Heads of a different size are padded with zeros to the next larger
    size, also in the cache. The larger size must be at most twice as large, or at most 32.
    kv_cache_dtypes: empty if the cache always has the dtype of the model.
    """

    dtypes: frozenset[str]
    device_types: frozenset[str] = frozenset()
    kv_cache_dtypes: frozenset[str] = frozenset()
    head_sizes: frozenset[int] = frozenset()
    block_size_multiple: int = 1
    features: frozenset[str] = frozenset()

    def stored_head_size(self, head_size: int) -> int:
        """Return the padded size of heads of `head_size`, or 0 if the size is not supported."""
        if not self.head_sizes or head_size in self.head_sizes:
            return head_size
        maximum = max(2 * head_size, SMALL_HEAD_SIZE)
        return min((size for size in self.head_sizes if head_size < size <= maximum), default=0)

    def refusals(self, requirements: AttentionRequirements) -> list[str]:
        """Return one sentence for each requirement that is not met."""
        reasons = []
        if self.device_types and requirements.device_type not in self.device_types:
            reasons.append(_reason("device", requirements.device_type, self.device_types))
        if requirements.dtype not in self.dtypes:
            reasons.append(_reason("dtype", requirements.dtype, self.dtypes))
        cache_dtypes = self.kv_cache_dtypes or frozenset({requirements.dtype})
        if requirements.kv_cache_dtype not in cache_dtypes:
            reasons.append(_reason("KV cache dtype", requirements.kv_cache_dtype, cache_dtypes))
        if not self.stored_head_size(requirements.head_size):
            reasons.append(_reason("head size", requirements.head_size, self.head_sizes))
        if requirements.block_size % self.block_size_multiple:
            multiples = f"multiples of {self.block_size_multiple}"
            reasons.append(
                f"block size {requirements.block_size} is not supported; supported: {multiples}"
            )
        missing = sorted(requirements.features - self.features)
        reasons += [f"{feature} is required but not declared" for feature in missing]
        return reasons


def _reason(what: str, value: object, known: frozenset[Any]) -> str:
    return f"{what} {value} is not supported; supported: {', '.join(map(str, sorted(known)))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """The shape of one step for one KV-cache group, as device tensors and host copies.

    query_start_R1: int32 [R + 1]; request i has tokens query_start[i] .. query_start[i + 1] - 1.
    seq_lens_R: int32 [R]; number of tokens of request i after this step, including the tokens of
    the step.
    block_table_RM: int32 [R, M]; entries beyond a request's blocks are 0. With a sliding window,
    blocks outside of the window may belong to other requests and contain any values, including NaN.
    These values must not affect the result (0 · NaN is NaN).
    slot_mapping_T: int64 [T]; block · B + offset of the slot for each token's key and value.
    query_lens, seq_lens: the lengths of each request on the host, as Python integers.
    """

    query_start_R1: torch.Tensor
    seq_lens_R: torch.Tensor
    block_table_RM: torch.Tensor
    slot_mapping_T: torch.Tensor
    query_lens: Sequence[int]
    seq_lens: Sequence[int]

    @property
    def num_requests(self) -> int:
        """Number of requests in the batch."""
        return len(self.query_lens)


@dataclass(frozen=True, kw_only=True)
class AttentionGroupContext:
    """Arguments of `create_builder`, for one KV-cache group of one worker.

    options: validated options of the backend plugin.
    workspace: a function that takes a number of bytes and returns a uint8 tensor of at least that
        size, for intermediate results of a layer. All builders of the worker share this memory. The
        memory is zero before its first use. None: the builder allocates its own memory.
    bidirectional: as for `AttentionLayerContext`. If True, slots and block tables have no meaning.
    spec: a `LatentAttentionSpec` only for a backend that declares `MLA`.
    """

    spec: FullAttentionSpec
    device: torch.device
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    options: Mapping[str, object] = field(default_factory=dict)
    workspace: Callable[[int], torch.Tensor] | None = None
    bidirectional: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionLayerContext:
    """Arguments of `create_layer`.

    scale: multiplier of the attention scores before the softmax.
    soft_cap: c in c·tanh(score / c); 0 for none.
    sliding_window: number of tokens that a token attends to, itself included; 0 for all.
    sinks: float32 [H], or None. One extra softmax logit per query head, neither scaled nor capped,
        without a value, so that the weights sum to less than 1. A parameter of the model, read
        only; its values may be loaded after this call. Only for a backend that declares "sinks".
        Source: Xiao et al. 2023, arXiv:2309.17453.
    alibi_slopes: float32 [H], or None. The scores of head h, scaled and capped, get the bias
        slope · (position of the key - position of the query) before the softmax. Only for a backend
        that declares "alibi". Source: Press et al. 2022, arXiv:2108.12409.
    kv_scales: float32 [2], one scale for all keys and one for all values of the layer, in an fp8
        cache without per-token scales; None for scales of 1. The cache contains k / scale. Only for
        a backend that declares `KV_LAYER_SCALES`. Values may change between steps, when weights are
        reloaded.
    bidirectional: each token attends to all tokens of its prompt, which is computed in one step.
        With a sliding window, the distance to these tokens must be less than `sliding_window`. The
        layer has no cache: `kv_cache` is empty and must not be used. Only for a backend that
        declares "bidirectional".
    value_size: 0 for values of `head_size` features. Otherwise the value of a token is the first
        `value_size` features of its key, as in multi-head latent attention. The cache, whose spec
        is a `LatentAttentionSpec`, contains only keys. `v_TKD` is a view of `k_TKD`, and `out_THD`
        has `value_size` features. Such a layer never gets `rotary_args`. Only for a backend that
        declares `MLA`. Source: DeepSeek-AI 2024, arXiv:2405.04434.
    options: validated options of the backend plugin.
    """

    layer_name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    dtype: torch.dtype
    device: torch.device
    sliding_window: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    kv_scales: torch.Tensor | None = None
    bidirectional: bool = False
    value_size: int = 0
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryArgs:
    """Arguments of `Ops.rotary_embedding` for the tokens of a step.

    A backend may apply them in its attention kernel. The result must equal that of `ops`.
    positions_T: int64. cos_sin_PR: float32 [P positions, rotary_dim].
    """

    ops: Ops
    positions_T: torch.Tensor
    cos_sin_PR: torch.Tensor

    def apply(self, q_THD: torch.Tensor, k_TKD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply `ops.rotary_embedding` to q and k, and return the results."""
        return self.ops.rotary_embedding(q_THD, k_TKD, self.positions_T, self.cos_sin_PR)


class AttentionMetadataBuilder(ABC):
    """Builds the metadata of the backend's layers, once per step and KV-cache group.

    reorder_threshold: in each batch, requests with at most this many tokens in the step precede all
    others, so that decodes and prefills can use separate kernels; 0 for any order.
    """

    reorder_threshold: int = 0

    @abstractmethod
    def build(self, batch: AttentionBatch) -> Any:
        """Return the metadata of this step, which only the backend's layers read.

        `batch` is read only. The result is not used after the next call.
        """


class AttentionLayer(ABC):
    """Attention of one layer over its paged cache."""

    @abstractmethod
    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        out_THD: torch.Tensor,
        rotary_args: RotaryArgs | None = None,
    ) -> None:
        """Write k and v to the cache, attend causally, and write the result to `out_THD`.

        Token t of a request in this step has position seq_len - query_len + t. It attends to the
        positions up to its own, within the window. All other inputs are read only.
        kv_cache: the cache of this layer, in the shape of `kv_cache_shape`.
        rotary_args: apply RoPE to q and k first; None if they already have it. Only a backend that
            declares "rotary" receives it and needs the parameter.
        """


class AttentionBackend(ABC):
    """An implementation of attention over a paged KV cache.

    name: the name that users give. capabilities: what the backend supports; the core compares it
    with the requirements.
    """

    CONTRACT: ClassVar[str] = "attention"
    CONTRACT_VERSION: ClassVar[str] = "0.12"
    name: ClassVar[str]
    capabilities: ClassVar[AttentionCapabilities]

    @classmethod
    def refusals(cls, requirements: AttentionRequirements) -> Sequence[str]:
        """Return further reasons why the backend cannot be used, such as a missing library."""
        return ()

    @staticmethod
    @abstractmethod
    def kv_cache_shape(num_blocks: int, spec: FullAttentionSpec) -> tuple[int, ...]:
        """Return the shape of one layer's cache, which has num_blocks · page_size_bytes bytes."""

    @staticmethod
    @abstractmethod
    def create_builder(context: AttentionGroupContext) -> AttentionMetadataBuilder:
        """Return the metadata builder of a KV-cache group."""

    @staticmethod
    @abstractmethod
    def create_layer(context: AttentionLayerContext) -> AttentionLayer:
        """Return the attention layer."""


if not TYPE_CHECKING:  # a type checker reports an unknown name itself
    __getattr__ = reject_retired(__name__)
