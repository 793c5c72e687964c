"""The attention context of the forward pass: layers, caches and this step's metadata, by index.

A model gets the table as an argument and calls `attend`. In eager mode `attend` is a normal call.
Under `torch.compile` it is one custom operator that gets the table's slot, an integer: a compiled
graph contains no Python object, and two engines in one process have two slots. Compiled code that
several engines can use has the slot `CURRENT` instead: the table of this thread's forward pass.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from dovetail.errors import ContractError
from dovetail.interfaces import AttentionLayer, LayerState, RotaryArgs, StateTensor
from dovetail.interfaces.ops import StateParts

CURRENT = -1
"""The slot of the table that `current_table` sets."""

_SLOTS = itertools.count()
_TABLES: WeakValueDictionary[int, AttentionTable] = WeakValueDictionary()


class _Thread(threading.local):
    table: AttentionTable | None = None


_THREAD = _Thread()


@contextmanager
def current_table(table: AttentionTable) -> Iterator[None]:
    """Let compiled code with the slot `CURRENT` use `table`, in this thread."""
    before, _THREAD.table = _THREAD.table, table
    try:
        yield
    finally:
        _THREAD.table = before


class TakesAttention(Protocol):
    """Receives the calls of attention layers while a forward pass is captured."""

    def attend(
        self,
        index: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        rotary_args: RotaryArgs | None,
    ) -> torch.Tensor:
        """Return the memory of the call's result, contiguous [T, H, D]."""


class AttentionTable:
    """Attention of all layers of one runner. Implements `AttentionContext`.

    slot: index of the table, unique in the process. metadata: this step's metadata, one entry per
    builder. needed_S: int64; this step's tokens that are needed after the last attention layer,
    None for all. The runner sets both before each forward pass. capture: if not None, it takes the
    calls of layers, because the pass is captured in pieces.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer | None],
        caches: Sequence[torch.Tensor],
        builder_of: Sequence[int],
        *,
        rotates: bool = False,
        states: Mapping[int, Sequence[torch.Tensor]] = MappingProxyType({}),
    ) -> None:
        """The first three arguments are indexed by layer.

        builder_of: the index of each layer's metadata.

        rotates: whether the layers apply rotary embedding themselves. states: the tensors of the
        recurrent layers, by index; the entries of these layers in `layers` are not used.
        """
        self.slot = next(_SLOTS)
        self.metadata: Sequence[Any] = ()
        self.needed_S: torch.Tensor | None = None
        self.capture: TakesAttention | None = None
        self._layers = tuple(layers)
        self._caches = tuple(caches)
        self._builder_of = tuple(builder_of)
        self._rotates = rotates
        self._states = {index: tuple(tensors) for index, tensors in states.items()}
        _TABLES[self.slot] = self

    def attend(
        self,
        index: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        rotary_args: RotaryArgs | None = None,
    ) -> torch.Tensor:
        """Write k and v to the layer's cache and return its attention, contiguous [T, H, D].

        D is the number of features of v.
        """
        compiles = torch.compiler.is_compiling()
        if rotary_args is not None and (compiles or not self._rotates):
            # The custom operator does not support rotation, and compilers fuse torch's rotation
            # anyway.
            q_THD, k_TKD = rotary_args.apply(q_THD, k_TKD)
            rotary_args = None
        if compiles:
            attended: torch.Tensor = torch.ops.dovetail.attend(
                q_THD, k_TKD, v_TKD, self.slot, index
            )
            return attended
        return self.run(index, q_THD, k_TKD, v_TKD, rotary_args)

    def state(self, index: int, tensors: Sequence[StateTensor]) -> LayerState:
        """Return the states of layer `index` in this step."""
        return LayerState(tensors=self._states[index], parts=self.metadata[self._builder_of[index]])

    def save_states(self, max_bytes: int) -> Callable[[], None] | None:
        """Copy the states that this step overwrites, and return a function that restores them.

        Returns None, without a copy, if they have more than `max_bytes`.
        """
        saved = [
            (tensor, self.metadata[self._builder_of[index]].writes_N)
            for index, tensors in self._states.items()
            for tensor in tensors
        ]
        if sum(len(blocks) * tensor[0].nbytes for tensor, blocks in saved) > max_bytes:
            return None
        copies = [tensor.index_select(0, blocks) for tensor, blocks in saved]

        def restore() -> None:
            for (tensor, blocks), copy in zip(saved, copies, strict=True):
                tensor.index_copy_(0, blocks, copy)

        return restore

    def narrow(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the rows that are needed after attention. All rows in a compiled graph."""
        if self.needed_S is None or torch.compiler.is_compiling():
            return x_TD
        return x_TD.index_select(0, self.needed_S)

    def run(
        self,
        index: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        rotary_args: RotaryArgs | None = None,
    ) -> torch.Tensor:
        """Run the attention of `attend`. rotary_args: only for layers that rotate."""
        if self.capture is not None:
            return self.capture.attend(index, q_THD, k_TKD, v_TKD, rotary_args)
        out_THD = new_result(q_THD, v_TKD)
        self.run_into(index, (q_THD, k_TKD, v_TKD, out_THD), rotary_args)
        return out_THD

    def run_into(
        self,
        index: int,
        tensors: tuple[torch.Tensor, ...],
        rotary_args: RotaryArgs | None,
    ) -> None:
        """Run the attention of `attend`. tensors: q, k, v, and the memory of the result."""
        q_THD, k_TKD, v_TKD, out_THD = tensors
        arguments = (self._caches[index], self.metadata[self._builder_of[index]], out_THD)
        layer = self._layers[index]
        assert layer is not None, f"layer {index} is recurrent, so it has no attention"
        if rotary_args is None:  # only layers that rotate have the argument
            layer.forward(q_THD, k_TKD, v_TKD, *arguments)
        else:
            layer.forward(q_THD, k_TKD, v_TKD, *arguments, rotary_args)


class CurrentAttention:
    """The attention context of a forward pass that is traced. Its table is `current_table`."""

    def attend(
        self,
        index: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        rotary_args: RotaryArgs | None = None,
    ) -> torch.Tensor:
        """Return a call of the custom operator, contiguous [T, H, D]."""
        if rotary_args is not None:
            q_THD, k_TKD = rotary_args.apply(q_THD, k_TKD)
        attended: torch.Tensor = torch.ops.dovetail.attend(q_THD, k_TKD, v_TKD, CURRENT, index)
        return attended

    def state(self, index: int, tensors: Sequence[StateTensor]) -> LayerState:
        """Raise ContractError: the worker does not compile recurrent models."""
        raise ContractError(f"layer {index} is recurrent, so the model cannot be traced")

    def narrow(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return all rows."""
        return x_TD


class NoAttention:
    """An attention context for runs before the KV cache exists. Its attention returns zeros.

    Checks that the model declared its layers, so that a mistake is reported at startup. States are
    those of new requests, which share one block.
    """

    def __init__(self, num_layers: int, num_tokens: int = 1, num_requests: int = 1) -> None:
        """num_layers: number of attention layers and recurrent layers.

        num_tokens, num_requests: the size of the forward pass; all requests but one have one token.
        """
        self._num_layers = num_layers
        self._sizes = (num_tokens - num_requests + 1, *(1,) * (num_requests - 1))

    def attend(
        self,
        index: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        rotary_args: RotaryArgs | None = None,
    ) -> torch.Tensor:
        """Return zeros, contiguous [T, H, D]. Raise ContractError for an undeclared layer."""
        if not 0 <= index < self._num_layers:
            raise ContractError(
                f"the model computes attention in layer {index}, but has {self._num_layers} "
                "Attention "
                "modules (dovetail_torch.layers.Attention), which must have consecutive "
                "indices from 0."
            )
        # This needs as much memory as a step with a backend that does not rotate.
        turned = (q_THD, k_TKD) if rotary_args is None else rotary_args.apply(q_THD, k_TKD)
        return turned[0].new_zeros((*q_THD.shape[:-1], v_TKD.shape[-1]))

    def state(self, index: int, tensors: Sequence[StateTensor]) -> LayerState:
        """Return states of zeros, like those of new requests.

        Raise ContractError for an undeclared layer.
        """
        if not 0 <= index < self._num_layers:
            raise ContractError(
                f"layer {index} of the model is recurrent, but the model has {self._num_layers} "
                "modules for attention and states (dovetail_torch.layers.StateLayer), which must "
                "have consecutive indices from 0."
            )
        blocks = torch.zeros(len(self._sizes), dtype=torch.int64, device=tensors[0].device)
        parts = StateParts(
            sizes=self._sizes,
            num_parts=(1,) * len(self._sizes),
            reads_N=blocks - 1,
            writes_N=blocks,
        )
        zeros = tuple(
            torch.zeros((1, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
            for tensor in tensors
        )
        return LayerState(tensors=zeros, parts=parts)

    def narrow(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return all rows."""
        return x_TD


def new_result(q_THD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
    """Return memory for the attention result: the heads of q with the features of v."""
    return q_THD.new_empty((*q_THD.shape[:-1], v_TKD.shape[-1]))


def run_attend(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, slot: int, index: int
) -> torch.Tensor:
    """Run the layer `index` of the table `slot`: the implementation of `dovetail::attend`."""
    table = _THREAD.table if slot == CURRENT else _TABLES[slot]
    assert table is not None, "no table is set in this thread"
    return table.run(index, q_THD, k_TKD, v_TKD)


_attend = torch.library.custom_op("dovetail::attend", run_attend, mutates_args=())


@_attend.register_fake
def _attend_shape(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, slot: int, index: int
) -> torch.Tensor:
    return new_result(q_THD, v_TKD)
