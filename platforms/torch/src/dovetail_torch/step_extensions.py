"""The step extensions of a worker: the rows that use each extension, and the calls of hooks.

This module stores for each extension the rows that use it and the hooks that it overrides, so that
a step without such rows only tests whether a set is empty. An error in a hook ends the request that
caused it, not the step. This module does not depend on what an extension does. Dimensions: T tokens
of the step, D hidden size, S rows that sample, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from dovetail.errors import ContractError
from dovetail.interfaces import ExtensionBatch, StepExtension
from dovetail.plan import NewRequest, SchedulerOutput
from dovetail.plugins.containment import describe_failure

if TYPE_CHECKING:
    from dovetail_torch.sampling.device_access import Upload

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_HOOKS = ("before_forward", "hidden_states", "logits", "after_sampling")


@dataclass(frozen=True, kw_only=True)
class _Member:
    """An extension, the hooks that it overrides, and the rows that use it."""

    extension: StepExtension
    name: str
    hooks: frozenset[str]
    rows: set[int] = field(default_factory=set)


class StepExtensions:
    """Calls the extensions in order, as their contract specifies.

    rows: rows that use any extension. logits_rows, hidden_rows: rows that use an extension
    with a hook on logits, or on hidden states. errors: messages by failed row.
    """

    def __init__(self, extensions: Mapping[str, StepExtension], upload: Upload) -> None:
        """extensions: extensions by display name. upload: sends numbers to the device."""
        self._upload = upload
        self._members = [
            _Member(extension=extension, name=name, hooks=_hooks_of(type(extension)))
            for name, extension in extensions.items()
        ]
        self.rows: set[int] = set()
        self.logits_rows: set[int] = set()
        self.hidden_rows: set[int] = set()
        self.errors: dict[int, str] = {}

    @torch.inference_mode()
    def join(self, request: NewRequest) -> None:
        """Add the new request to each extension that it uses."""
        if not self._members:
            return
        row = request.row
        self.leave(row)
        for member in self._members:
            if any(self._call(member, "join", [row], partial(_join, member, request))):
                self._add(member, row)

    @torch.inference_mode()
    def leave(self, row: int) -> None:
        """Remove `row` from all extensions."""
        self.errors.pop(row, None)
        if row not in self.rows:
            return
        for member in self._members:
            if row in member.rows:
                self._leave(member, row)
        self._discard(row)

    @torch.inference_mode()
    def before_forward(self, plan: SchedulerOutput, first_R: np.ndarray) -> None:
        """Call the hook before the forward pass of the step.

        first_R: each request's first token.
        """
        for member, own in self._extensions_with_hook("before_forward", plan.rows):
            self._call(member, "before_forward", own, partial(_prepare, member, plan, first_R))

    @torch.inference_mode()
    def hidden_states(
        self, plan: SchedulerOutput, first_R: np.ndarray, hidden_TD: torch.Tensor
    ) -> torch.Tensor:
        """Return the hidden states of all tokens after all extensions."""
        for member, own in self._extensions_with_hook("hidden_states", plan.rows):
            hook = partial(self._hidden_states_of, member, plan, first_R, hidden_TD)
            changes = [item for item in self._call(member, "hidden_states", own, hook) if item]
            hidden_TD = hidden_TD.clone() if changes else hidden_TD
            for index_T, new_TD in changes:
                hidden_TD.index_copy_(0, index_T, new_TD)
        return hidden_TD

    @torch.inference_mode()
    def logits(self, logits_SV: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Change float32 logits in place and return them. rows: the rows that sample, in order."""
        place_of = {row: index for index, row in enumerate(rows)}
        for member, own in self._extensions_with_hook("logits", rows):
            hook = partial(self._logits_of, member, logits_SV, place_of)
            for index_R, new_RV in self._call(member, "logits", own, hook):
                logits_SV.index_copy_(0, index_R, new_RV)
        return logits_SV

    @torch.inference_mode()
    def after_sampling(self, rows: Sequence[int], token_ids_S: torch.Tensor) -> None:
        """Pass the sampled tokens to the extensions. rows: the rows that sample, in order."""
        place_of = {row: index for index, row in enumerate(rows)}
        for member, own in self._extensions_with_hook("after_sampling", rows):
            hook = partial(self._tokens_of, member, token_ids_S, place_of)
            self._call(member, "after_sampling", own, hook)

    def run_errors(self, plan: SchedulerOutput) -> Mapping[int, str]:
        """Return the errors of the plan's requests, by position in the plan."""
        errors = self.errors
        return {run: errors[row] for run, row in enumerate(plan.rows) if row in errors}

    def _extensions_with_hook(
        self, hook: str, rows: Sequence[int]
    ) -> Iterator[tuple[_Member, list[int]]]:
        """Yield each extension that overrides the hook, with the rows among `rows` that use it."""
        for member in self._members:
            if hook in member.hooks and member.rows:
                own = [row for row in rows if row in member.rows]
                if own:
                    yield member, own

    def _hidden_states_of(
        self,
        member: _Member,
        plan: SchedulerOutput,
        first_R: np.ndarray,
        hidden_TD: torch.Tensor,
        rows: Sequence[int],
    ) -> _Change | None:
        batch = _batch_of(plan, first_R, rows)
        runs = zip(batch.first_tokens, batch.num_tokens, strict=True)
        index_T = self._index([first + offset for first, count in runs for offset in range(count)])
        given_TD = hidden_TD.index_select(0, index_T)
        shape = given_TD.shape
        new_TD = member.extension.hidden_states(batch, given_TD)
        if new_TD is None:
            return None
        _check_like("hidden_states", new_TD, given_TD, shape)
        return index_T, new_TD

    def _logits_of(
        self,
        member: _Member,
        logits_SV: torch.Tensor,
        place_of: Mapping[int, int],
        rows: Sequence[int],
    ) -> _Change:
        index_R = self._index([place_of[row] for row in rows])
        given_RV = logits_SV.index_select(0, index_R)
        shape = given_RV.shape
        new_RV = member.extension.logits(rows, given_RV)
        _check_like("logits", new_RV, given_RV, shape)
        return index_R, new_RV

    def _tokens_of(
        self,
        member: _Member,
        token_ids_S: torch.Tensor,
        place_of: Mapping[int, int],
        rows: Sequence[int],
    ) -> None:
        index_R = self._index([place_of[row] for row in rows])
        member.extension.after_sampling(rows, token_ids_S.index_select(0, index_R))

    def _index(self, positions: Sequence[int]) -> torch.Tensor:
        return self._upload(np.array(positions, np.int64))

    def _call(
        self,
        member: _Member,
        hook: str,
        rows: Sequence[int],
        call: Callable[[Sequence[int]], Result],
    ) -> list[Result]:
        """Call a hook for all rows or, if that raises, for each row. Return the results."""
        try:
            return [call(rows)]
        except Exception as error:
            if len(rows) == 1:
                self._fail(member, hook, rows[0], error)
                return []
        return [result for row in rows for result in self._call(member, hook, [row], call)]

    def _fail(self, member: _Member, hook: str, row: int, error: Exception) -> None:
        """Record that the row's request cannot continue, and remove the row from all extensions."""
        self.errors.setdefault(
            row,
            f"{member.name} failed in {hook}: {describe_failure(error)}. "
            "Correct or remove the request's extra_args for this extension, or correct "
            "the extension.",
        )
        for other in self._members:
            if row in other.rows:
                self._leave(other, row)
        self._discard(row)

    def _leave(self, member: _Member, row: int) -> None:
        member.rows.discard(row)
        try:
            member.extension.leave(row)
        except Exception as error:
            failure = describe_failure(error)
            logger.warning(
                "The step extension %s failed while a row was removed: %s", member.name, failure
            )

    def _add(self, member: _Member, row: int) -> None:
        if row in self.errors:  # an earlier extension has failed for this row
            self._leave(member, row)
            return
        member.rows.add(row)
        self.rows.add(row)
        if "logits" in member.hooks:
            self.logits_rows.add(row)
        if "hidden_states" in member.hooks:
            self.hidden_rows.add(row)

    def _discard(self, row: int) -> None:
        for rows in (self.rows, self.logits_rows, self.hidden_rows):
            rows.discard(row)


_Change = tuple[torch.Tensor, torch.Tensor]
"""The indices of changed rows, int64, and their new contents."""


def _join(member: _Member, request: NewRequest, rows: Sequence[int]) -> bool:
    joins = member.extension.join(rows[0], request)
    if not isinstance(joins, bool):
        raise ContractError(f"join() returned {joins!r:.80}; return True or False instead.")
    return joins


def _prepare(
    member: _Member, plan: SchedulerOutput, first_R: np.ndarray, rows: Sequence[int]
) -> None:
    member.extension.before_forward(_batch_of(plan, first_R, rows))


def _batch_of(plan: SchedulerOutput, first_R: np.ndarray, rows: Collection[int]) -> ExtensionBatch:
    """Return the batch of the requests of `plan` whose rows are in `rows`."""
    row_set = set(rows)
    runs = [run for run, row in enumerate(plan.rows) if row in row_set]
    return ExtensionBatch(
        rows=[plan.rows[run] for run in runs],
        starts=[plan.starts[run] for run in runs],
        num_tokens=[plan.num_tokens[run] for run in runs],
        samples=[bool(plan.samples[run]) for run in runs],
        first_tokens=[int(first_R[run]) for run in runs],
        total_num_tokens=plan.total_num_tokens,
    )


def _check_like(hook: str, new: object, tensor: torch.Tensor, shape: torch.Size) -> None:
    """Raise ContractError unless `new` has the type, shape and dtype of the hook's input."""
    if not isinstance(new, torch.Tensor):
        raise ContractError(f"{hook} returned a {type(new).__name__}; return a tensor instead.")
    for what, actual, due in (
        ("shape", tuple(new.shape), tuple(shape)),
        ("dtype", new.dtype, tensor.dtype),
        ("device", new.device, tensor.device),
    ):
        if actual != due:
            raise ContractError(f"{hook} returned {what} {actual}; it must return {due}.")


def _hooks_of(cls: type) -> frozenset[str]:
    """Return the names of the hooks that a class implements itself."""
    return frozenset(
        hook
        for hook in _HOOKS
        if getattr(cls, hook, None) not in (None, getattr(StepExtension, hook))
    )
