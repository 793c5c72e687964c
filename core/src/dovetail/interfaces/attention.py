"""The contract of an attention backend: capabilities, metadata builder, layer.

The core holds what a model asks (`AttentionRequirements`) against what a backend declares
(`AttentionCapabilities`); what is asked and not declared is a refusal. Tensors appear in signatures
only: this module imports no tensor library.

Shape legend: T tokens of the step, R requests of the step, H query heads, K key-value heads,
D head size, B block size, N blocks, M block-table width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail.retired_names import refuse_retired

if TYPE_CHECKING:
    import torch

    from dovetail.interfaces.ops import Ops

ROTARY = "rotary"
"""The feature of a backend whose layers turn queries and keys; no model asks for it."""


SMALL_HEAD_SIZE = 32
"""To which heads are padded even if that more than doubles them."""


@dataclass(frozen=True, kw_only=True)
class AttentionFacts:
    """The attention of a model. sliding_window, soft_cap, sinks: whether some layer has such."""

    head_size: int
    num_heads: int
    num_kv_heads: int
    sliding_window: bool = False
    soft_cap: bool = False
    sinks: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionRequirements:
    """What a model on a platform demands of an attention backend.

    dtype, kv_cache_dtype: names such as "bfloat16". device_type: as tensors are told it.
    features: ids of everything beyond plain causal attention over a paged cache:
        "sliding_window", "soft_cap", "sinks" (some layer has logits without a value), "cascade",
        "batch_invariant" (a token's result has the same bits whatever the other runs and however
        its prompt is cut), … A backend that does not declare an id refuses it, so that a new
        demand fails closed.
    """

    device_type: str
    dtype: str
    kv_cache_dtype: str
    head_size: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class AttentionCapabilities:
    """What an attention backend does.

    device_types: () for any. block_size_multiple: of which block sizes are.
    head_sizes: () for any. A model whose head size is not among them gets the next larger one, if
        that is at most twice as large or 32: its heads are padded with zeros, in the cache too.
    kv_cache_dtypes: () for the same as `dtypes`, the cache then having the dtype of the model.
    """

    dtypes: frozenset[str]
    device_types: frozenset[str] = frozenset()
    kv_cache_dtypes: frozenset[str] = frozenset()
    head_sizes: frozenset[int] = frozenset()
    block_size_multiple: int = 1
    features: frozenset[str] = frozenset()

    def stored_head_size(self, head_size: int) -> int:
        """Return the head size in which heads of `head_size` are stored, or 0 if there is none."""
        if not self.head_sizes or head_size in self.head_sizes:
            return head_size
        most = max(2 * head_size, SMALL_HEAD_SIZE)
        return min((size for size in self.head_sizes if head_size < size <= most), default=0)

    def refusals(self, requirements: AttentionRequirements) -> list[str]:
        """Return one sentence for each of `requirements` that is not met; empty if all are met."""
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
            reasons.append(f"block size {requirements.block_size} is asked; it does {multiples}")
        missing = sorted(requirements.features - self.features)
        reasons += [f"{feature} is asked; it does not declare it" for feature in missing]
        return reasons


def _reason(what: str, asked: object, known: frozenset[Any]) -> str:
    return f"{what} {asked} is asked; it does {', '.join(map(str, sorted(known)))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """The shape of one step, for one KV-cache group. Device tensors, with host copies beside them.

    query_start_R1: int32 [R + 1]; run i's tokens are query_start[i] .. query_start[i + 1] - 1.
    seq_lens_R: int32 [R]; tokens of run i's row after this step (computed ones and the run's).
    block_table_RM: int32 [R, M]; entries beyond a row's blocks are 0. In a group with a sliding
        window, blocks that no token of the run sees may belong to others and hold anything, NaN
        too: they must not be read in a way that matters (0 · NaN is NaN).
    slot_mapping_T: int64 [T]; block · B + offset where each token's key and value go.
    query_lens, seq_lens: the same on the host, as Python integers.
    """

    query_start_R1: torch.Tensor
    seq_lens_R: torch.Tensor
    block_table_RM: torch.Tensor
    slot_mapping_T: torch.Tensor
    query_lens: Sequence[int]
    seq_lens: Sequence[int]

    @property
    def num_requests(self) -> int:
        """Number of runs."""
        return len(self.query_lens)


@dataclass(frozen=True, kw_only=True)
class AttentionGroupContext:
    """What a metadata builder is made from: one KV-cache group of one runner.

    options: the backend plugin's own, validated.
    """

    spec: FullAttentionSpec
    device: torch.device
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AttentionLayerContext:
    """What an attention layer is made from.

    scale: factor on the scores before the softmax. soft_cap: c in c·tanh(score / c); 0 for none.
    sliding_window: tokens that a token sees, itself included; 0 for all.
    sinks: float32 [H], or None. A logit for each query head that takes part in the softmax as it
        is, neither scaled nor capped, and has no value: weights sum to less than 1. A parameter of
        the model (its values may come after the layer is made), only read; a backend that does not
        declare "sinks" is never given one. Source: Xiao et al. 2023, arXiv:2309.17453.
    options: the backend plugin's own, validated.
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
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryArgs:
    """The rotary embedding of a step's tokens, as words to be carried out by whoever does it best.

    positions_T: int64. cos_sin_PR: float32 [P positions, rotary size], as
    `Ops.rotary_embedding` reads it, which says what is to come out.
    """

    ops: Ops
    positions_T: torch.Tensor
    cos_sin_PR: torch.Tensor

    def apply(self, q_THD: torch.Tensor, k_TKD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k, turned by the ops."""
        return self.ops.rotary_embedding(q_THD, k_TKD, self.positions_T, self.cos_sin_PR)


class AttentionMetadataBuilder(ABC):
    """Turns the shape of a step into what the backend's layers need; once a step and group."""

    @abstractmethod
    def build(self, batch: AttentionBatch) -> Any:
        """Return this step's metadata, opaque to everybody else. Only reads `batch`.

        The result is used before the next call and not after it.
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

        rotation: turns q and k first; None where that is already done. Only a backend that declares
        "rotary" is given one, and need have the argument. Token t of a run stands at position
        seq_len - query_len + t and sees the positions up to its own, within the window.
        kv_cache: as `kv_cache_shape` says, the layer's own; mutated. The inputs are only read.
        """


class AttentionBackend(ABC):
    """One way to compute attention.

    name: what users call it. capabilities: what it does; evaluated by the core.
    """

    CONTRACT: ClassVar[str] = "attention"
    CONTRACT_VERSION: ClassVar[str] = "0.6"
    name: ClassVar[str]
    capabilities: ClassVar[AttentionCapabilities]

    @classmethod
    def refusals(cls, requirements: AttentionRequirements) -> Sequence[str]:
        """Return reasons beyond the declared capabilities (a missing library, say), or ()."""
        return ()

    @staticmethod
    @abstractmethod
    def kv_cache_shape(num_blocks: int, spec: FullAttentionSpec) -> tuple[int, ...]:
        """Return the shape of one layer's cache. Its bytes are num_blocks · page_size_bytes."""

    @staticmethod
    @abstractmethod
    def create_builder(context: AttentionGroupContext) -> AttentionMetadataBuilder:
        """Return the metadata builder of a group."""

    @staticmethod
    @abstractmethod
    def create_layer(context: AttentionLayerContext) -> AttentionLayer:
        """Return the attention of a layer."""


if not TYPE_CHECKING:  # a type checker reports an unknown name itself
    __getattr__ = refuse_retired(__name__)
