"""The contract of a model: the forward pass of one architecture.

A model maps token ids and positions to hidden states and passes q, k and v to the attention context
that it gets as an argument. It does not depend on requests, blocks, batches or devices.
Dimensions: T tokens of the step, S sampled positions, D hidden size, V width of the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

    from dovetail.interfaces.attention import RotaryArgs
    from dovetail.interfaces.linear_method import LinearMethod
    from dovetail.interfaces.ops import Ops, StateParts


class RankGroup(Protocol):
    """The workers that share the layers of a model, with their collective operations.

    Contract: All ranks call the same operations in the same order, with tensors of the same shape
    and dtype, and get bit-identical results. An operation raises PeerLostError if a rank has exited
    or does not call the operation. rank: from 0 to size - 1.
    """

    @property
    def rank(self) -> int:
        """Index of this worker in the group, from 0."""

    @property
    def size(self) -> int:
        """Number of workers in the group."""

    @property
    def batch_invariant(self) -> bool:
        """Whether `all_reduce` results never depend on the tensor's shape or an element's index."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks. `x` may be overwritten and returned."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, concatenated along the last dimension by rank."""

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor of rank 0. `x` may be overwritten and returned."""


@dataclass(frozen=True, kw_only=True)
class OneRank:
    """The group of a single worker: each operation returns its argument."""

    rank: int = 0
    size: int = 1
    batch_invariant: bool = True

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x


ONE_RANK = OneRank()


@dataclass(frozen=True, kw_only=True)
class ModelContext:
    """Constructor arguments of a model.

    hf_config: the checkpoint's config.json with the user's overrides, read-only.
    linear_method, ops: the plugins that its layers use.
    max_model_len: number of positions to support. options: validated options of the model plugin.
    ranks: the workers that share the model's layers. Layers read it from this context.
    """

    hf_config: Mapping[str, Any]
    dtype: torch.dtype
    device: torch.device
    linear_method: LinearMethod
    ops: Ops
    max_model_len: int
    options: Mapping[str, object] = field(default_factory=dict)
    ranks: RankGroup = ONE_RANK


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a layer's state: its shape for one request, its dtype and its device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """The states of a recurrent layer, for one step.

    tensors: one tensor for each `StateTensor`, [B blocks, *shape]. Blocks may be strided. parts:
    which blocks the tokens of the step read and write.
    """

    tensors: tuple[torch.Tensor, ...]
    parts: StateParts


class AttentionContext(Protocol):
    """Gives layers access to the attention backend and to recurrent states in a forward pass.

    It is an argument, not global state: one process may run engines with different backends.
    """

    def attend(
        self,
        index: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        rotary_args: RotaryArgs | None = None,
    ) -> torch.Tensor:
        """Return the attention of layer `index` (in the order of construction), [T, H, D].

        rotary_args: the rotary embedding to apply to q and k first; None if it is already applied.
        A context that cannot fuse both operations calls `rotary_args.apply` first.
        """

    def state(self, index: int, tensors: Sequence[StateTensor]) -> LayerState:
        """Return the states of the recurrent layer `index`.

        Attention layers and recurrent layers are numbered together, in the order of construction.
        tensors: the tensors of a state; the same in every call.
        """

    def narrow(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the rows of `x` (one per token) that are still needed after the last attention.

        Returns `x` itself if all are needed. A model may call it for every tensor that it uses
        after its last attention. It then computes and returns only these tokens' hidden states.
        """


@dataclass(frozen=True, kw_only=True)
class WeightMapping:
    """Maps a weight of a checkpoint to weights of a model with different names or layouts.

    source: a name in the checkpoint, or a prefix of it that ends before a dot, so that a module's
        name includes its weight and its bias. `{}` matches one component, such as a layer's number.
        targets: names in the model, with the same number of `{}`. With several targets, the weight
        of the checkpoint contains their output features, concatenated in this order. Without
        targets, the model ignores the weight.
    transposed: the checkpoint stores matrices as [in, out], like GPT-2's Conv1D.
    groups: number of groups of output features. Each group has an equal part of every target, in
        the order of the targets: with 3 targets and one group per head, the rows are q, k and v of
        the first head, then q, k and v of the second.
    rotary_pairs: (head size, rotary_dim) if the first features of each head are stored as pairs
        (0, 1), (2, 3), … that are rotated together; the model has them in halves. (0, 0) if not.
    rotary_last: whether these features are the last of each head instead of the first.
    stacked: number of equal parts of the output features that are the checkpoint's first dimension:
        the weights of that many experts or heads in one tensor, [stacked, out, in]. 0 for a matrix.
    """

    source: str
    targets: tuple[str, ...] = ()
    transposed: bool = False
    groups: int = 1
    rotary_pairs: tuple[int, int] = (0, 0)
    rotary_last: bool = False
    stacked: int = 0


TOKEN_TYPE_BIT = 30
"""Bit of an input id that marks a token of the second string of a pair; see `Model`."""


class PoolingModel(Protocol):
    """Capability "pooling": a model that only pools; its `compute_logits` is not called.

    pooling_type: the default for how a request's hidden states become one vector: "last" (of the
    last token), "cls" (of the first token) or "mean". num_labels: number of classes of its head; 0
    for embeddings.
    """

    pooling_type: str
    num_labels: int

    def classify(self, pooled_RD: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the head, [R, num_labels], before any activation."""


class Model(Protocol):
    """A causal language model. In practice a `torch.nn.Module`.

    Attention layers. Workers based on `dovetail_torch` find the modules of class
    `dovetail_torch.layers.Attention`, and recurrent layers as modules of class
    `dovetail_torch.layers.StateLayer`. A model without such modules has no KV cache.

    Weights. Parameters have the names of the checkpoint. Fused layers name their parts
    (`LinearShape.part_names`). A model whose checkpoints use different names or layouts has an
    attribute `weight_mappings`, a sequence of `WeightMapping`, of the class or of the instance; the
    first one whose source matches applies. Linear methods always receive weights as [out, in], so
    that they can be quantized.
    architectures: the supported names in "architectures" of config.json.

    Tensor parallelism. A model may be shared by several ranks if its class attribute `provides`
    contains "tensor_parallel". Its layers then shard all sizes; the model does not process
    sharded features or heads outside of layers, and has a row-parallel layer after each
    column-parallel one.

    Exceptions. A model without position encoding or without a norm before its head declares it in
    `lacks`: "positions", "final_norm". Otherwise the conformance kit reports an error.

    Capabilities in `provides`. "pooling": see `PoolingModel`; its manifest must declare it too.
    "whole_prompts": all attention layers are bidirectional, so that a prompt must be computed in
    one step; its manifest must declare it too. "token_types": the model distinguishes the two texts
    of a pair; it gets the ids of the second text with bit `TOKEN_TYPE_BIT` set.

    A model with a table of learned positions has an attribute `max_positions`, an int. A larger
    `max_model_len` is rejected. Without the attribute it must support any position.
    """

    CONTRACT: ClassVar[str] = "model"
    CONTRACT_VERSION: ClassVar[str] = "0.10"
    architectures: ClassVar[tuple[str, ...]]

    def __init__(self, context: ModelContext) -> None:
        """Create the modules with uninitialized weights on the context's device.

        Raises ModelError, naming the field, for a value of config.json that is not supported.
        """

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the hidden states after the last norm, [T, D]. ids and positions are int64.

        If the model calls `attention.narrow`, it returns [S, D]: only the remaining tokens.
        """

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return the logits, [S, V]."""
