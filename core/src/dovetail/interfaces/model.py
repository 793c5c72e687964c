"""The contract of a model: the forward pass of one architecture, and no more.

A model knows nothing of requests, blocks, batches or devices: it maps token ids and positions to
hidden states and hands q, k, v to the attention context that it is given as an argument.
Legend: T tokens of the step, S sampled positions, D hidden size, V width of the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

    from dovetail.interfaces.attention import RotaryArgs
    from dovetail.interfaces.linear_method import LinearMethod
    from dovetail.interfaces.ops import Ops


class RankGroup(Protocol):
    """The workers that share each layer of a model, as its layers see them.

    Contract. All ranks call the same operations in the same order, with tensors of the same shape
    and dtype, and get the same bits. Raise PeerLostError where a rank is gone or does not come.
    rank: from 0 to size - 1.
    """

    @property
    def rank(self) -> int:
        """The worker's place."""

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def batch_invariant(self) -> bool:
        """Whether a sum has the same bits wherever in a tensor of whatever shape it stands."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks; `x` may be overwritten and returned."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the ranks' tensors side by side along the last dimension, in their order."""

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return what rank 0 gave; `x` may be overwritten and returned."""


@dataclass(frozen=True, kw_only=True)
class OneRank:
    """A worker that shares its model with nobody: each operation returns what it was given."""

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
    """All that a model is made from.

    hf_config: the checkpoint's config.json with the user's overrides, read-only.
    linear_method, ops: the providers that its layers use.
    max_model_len: positions to be prepared for. options: the model plugin's own, validated.
    ranks: who shares the model's layers; models pass the context on to their layers, which ask.
    """

    hf_config: Mapping[str, Any]
    dtype: torch.dtype
    device: torch.device
    linear_method: LinearMethod
    ops: Ops
    max_model_len: int
    options: Mapping[str, object] = field(default_factory=dict)
    ranks: RankGroup = ONE_RANK


class AttentionContext(Protocol):
    """What a model's attention layers are given with every forward pass.

    An argument, never ambient state: two engines with different backends live in one process.
    """

    def attend(
        self,
        index: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        rotary_args: RotaryArgs | None = None,
    ) -> torch.Tensor:
        """Return the attention of layer `index` (counted in the order of making), [T, H, D].

        rotation: by which q and k are still to be turned; None for those that are as they should
        be. A context that has nothing better to do with it calls `rotary_args.turn`.
        """

    def narrow(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the rows of `x`, one a token, that are still needed once all layers have attended.

        `x` itself where that is all of them. A model may call it for everything that continues from
        its last attention, and then computes and returns those tokens' hidden states alone.
        """


@dataclass(frozen=True, kw_only=True)
class WeightMapping:
    """Which weights of a model a checkpoint's weight fills, where names or layouts differ.

    source: a name in the checkpoint, or the beginning of one up to a dot, so that a module's name
        stands for its weight and its bias. `{}` stands for one component, such as a layer's number.
    targets: the model's names, with as many `{}`. Several: the checkpoint's weight holds their
        output features one after the other, in this order. None: the model does not use the weight.
    transposed: the checkpoint has its matrices as [in, out], as GPT-2's Conv1D does.
    """

    source: str
    targets: tuple[str, ...] = ()
    transposed: bool = False


class Model(Protocol):
    """A causal language model; in practice a `torch.nn.Module`.

    How a worker learns of its attention layers is between the two: workers of the torch layer find
    the `dovetail_torch.layers.Attention` modules; a model without any keeps no cache.
    Its parameters have the checkpoint's names. Fused layers say which names they fuse
    (`LinearShape.part_names`); the weight loader's table does the rest. A model whose checkpoints
    use other names or layouts has a class attribute `weight_mappings`, a sequence of
    `WeightMapping`; the first one whose source matches a name applies. Weights come to the linear
    method as [out, in] whatever the checkpoint's layout, so that they can be quantized.
    architectures: the names in config.json's "architectures" that it serves.

    A model whose class attribute `provides` has "tensor_parallel" may be shared by several ranks:
    it leaves every size that ranks divide to the layers that it is made of, does nothing of its own
    with features or heads that a rank has a part of, and a row-parallel layer follows each
    column-parallel one. Without the attribute it is never shared.

    A model without position encoding or without a norm before its head names that in `lacks`:
    "positions", "final_norm". The conformance kit takes either for a mistake otherwise.

    A model with a table of learned positions has an attribute `max_positions`, an int: requests are
    never longer, and a `max_model_len` above it is refused. Without it any position is asked of it.
    """

    CONTRACT: ClassVar[str] = "model"
    CONTRACT_VERSION: ClassVar[str] = "0.5"
    architectures: ClassVar[tuple[str, ...]]

    def __init__(self, context: ModelContext) -> None:
        """Make the modules with uninitialised weights on the context's device.

        Raises ModelError, naming the field, for a config.json value that it does not do.
        """

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the hidden states after the last norm, [T, D]. ids and positions are int64.

        [S, D] where the model narrows: those of the tokens that `attention.narrow` left.
        """

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return the logits, [S, V]."""
