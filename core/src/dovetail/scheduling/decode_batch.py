"""The requests that hold a batch slot. Decoding requests are members of a batch.

A decoding request does the same in every step, except for events: a block is full, or the last
token is sampled. Decoding requests are therefore members of one decode batch, which keeps the
columns of their next step. A step advances all members by adding one to a counter and to a column;
a member is accessed only at an event. Other requests that hold a batch slot are outside of the
batch. This module does not use the policy or the blocks; the mechanism handles full blocks.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter

from dovetail.int_columns import increment
from dovetail.request import STATIC_COUNTER, Request, SharedStepCounter

ADMISSION = attrgetter("admission")


MAX_STOP_IDS = 32
"""Maximum stop tokens of a member. If members change, the union of their stop tokens is recomputed,
so its size must be limited."""


def decodes(request: Request) -> bool:
    """Return whether `request` may be a member: exactly one output token is not computed yet."""
    return (
        request.num_uncomputed_tokens == 1
        and request.num_computed_tokens >= request.num_prompt_tokens
        and len(request.stop_token_ids) <= MAX_STOP_IDS
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStepRecord:
    """The members of the decode batch in one step, as columns in order of admission.

    The columns are never changed. order: admission numbers. token_ids: the lists of known tokens,
    to which the step's result is appended. stop_ids: every token that may end a member. capped:
    members that reach their length limit in this step. gone: members that ended or lost their row
    before the result arrived, by index.
    """

    members: list[Request]
    order: list[int]
    request_ids: list[str]
    token_ids: list[array[int]]
    rows: array[int]
    starts: array[int]
    stop_ids: frozenset[int]
    capped: list[Request]
    gone: dict[int, Request] = field(default_factory=dict)

    def place(self, request: Request) -> int:
        """Return the index of `request` among the members, or -1."""
        index = bisect_left(self.order, request.admission)
        is_member = index < len(self.members) and self.members[index] is request
        return index if is_member else -1


class DecodeBatch:
    """All requests that hold a batch slot.

    running: in order of admission. outside: the requests that are not members, in the same order.
    Other classes may only read these lists.
    """

    def __init__(self, block_size: int) -> None:
        self.running: list[Request] = []
        self.outside: list[Request] = []
        self._block_size = block_size
        self._num_admissions = 0
        self._step_counter = SharedStepCounter()
        self._members: list[Request] = []
        self._order: list[int] = []
        self._ids: list[str] = []
        self._tokens: list[array[int]] = []
        self._rows = array("i")
        self._starts = array("i")
        self._lent = False
        self._stops: Counter[frozenset[int]] = Counter()
        self._stop_ids: frozenset[int] | None = frozenset()
        self._by_phase: defaultdict[int, dict[Request, None]] = defaultdict(dict)
        self._by_last_step: defaultdict[int, dict[Request, None]] = defaultdict(dict)
        self._capped: list[Request] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members)

    def __contains__(self, request: Request) -> bool:
        return request.step_counter is self._step_counter

    @property
    def last_admission(self) -> int:
        """The admission number of the member that was admitted last, or -1 if there is none."""
        return self._order[-1] if self._order else -1

    # --- rows -----------------------------------------------------------------------------------

    def admit(self, request: Request) -> None:
        """Add a request that got its batch slot."""
        request.admission = self._num_admissions
        self._num_admissions += 1
        self.running.append(request)
        self.outside.append(request)

    def release(self, request: Request) -> None:
        """Remove a request that loses its batch slot."""
        del self.running[bisect_left(self.running, request.admission, key=ADMISSION)]
        if request in self:
            self._remove(request)
        else:
            del self.outside[bisect_left(self.outside, request.admission, key=ADMISSION)]

    # --- members --------------------------------------------------------------------------------

    def add_members(self, requests: list[Request]) -> None:
        """Add requests that hold a batch slot to the batch. Each has one token to compute."""
        self._copy_shared_columns()
        for request in requests:
            self._insert(request)
        self.outside = [request for request in self.outside if request not in self]

    def remove_member(self, request: Request) -> None:
        """Move a member out of the batch. It keeps its batch slot."""
        self._remove(request)
        index = bisect_left(self.outside, request.admission, key=ADMISSION)
        self.outside.insert(index, request)

    def remove_all_members(self) -> None:
        """Move all members out of the batch. They keep their batch slots."""
        for request in self._members:
            request.use_counter(STATIC_COUNTER)
        self.outside[:] = self.running
        self._members, self._order, self._ids, self._tokens = [], [], [], []
        self._rows, self._starts = array("i"), array("i")
        self._stops.clear()
        self._stop_ids = None
        self._by_phase.clear()
        self._by_last_step.clear()
        self._capped.clear()

    # --- steps ----------------------------------------------------------------------------------

    def take_full_members(self) -> list[Request]:
        """Return the members whose last block is full, in order of admission. Call once per step.

        Also records the members that reach their length limit in the next step; they leave the
        batch after that step.
        """
        step = self._step_counter.num_steps
        self._capped += self._by_last_step.pop(step, ())
        return sorted(self._by_phase.get(step % self._block_size, ()), key=ADMISSION)

    def take_step(self) -> DecodeStepRecord:
        """Advance all members by one token. Return the record of the step."""
        taken = DecodeStepRecord(
            members=self._members,
            order=self._order,
            request_ids=self._ids,
            token_ids=self._tokens,
            rows=self._rows,
            starts=self._starts,
            stop_ids=self._all_stop_ids(),
            capped=[request for request in self._capped if request in self],
        )
        self._lent = True
        self._starts = _advanced(self._starts)
        self._step_counter.num_steps += 1
        self._capped.clear()
        for request in taken.capped:
            self.remove_member(request)
        return taken

    @property
    def rows(self) -> array[int]:
        """The batch slot of each member, int32. Read only."""
        return self._rows

    @property
    def starts(self) -> array[int]:
        """The next position of each member, int32. Read only."""
        return self._starts

    @property
    def num_steps_to_limit(self) -> int:
        """The number of steps after which the first member reaches its length limit."""
        return min(member.event_step for member in self._members) - self._step_counter.num_steps

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every token that may end a member."""
        return self._all_stop_ids()

    @property
    def num_steps_to_full_members(self) -> int:
        """The number of steps, at least 1, after which the last block of a member is full."""
        step, size = self._step_counter.num_steps, self._block_size
        return min((phase - step - 1) % size for phase, full in self._by_phase.items() if full) + 1

    def find_turns(self, num_steps: int) -> Iterator[tuple[int, Request]]:
        """Yield the members whose last block is full at the start of one of `num_steps` steps.

        Each comes with the number of steps before that, 0 to `block_size` - 1. They are in the
        order in which their blocks become full, which repeats every `block_size` steps.
        """
        step, size = self._step_counter.num_steps, self._block_size
        phases = [((phase - step) % size, full) for phase, full in self._by_phase.items() if full]
        if len(phases) > 1:
            phases.sort(key=itemgetter(0))
        for num_before, full in phases:
            if num_before < num_steps:
                members = sorted(full, key=ADMISSION) if len(full) > 1 else full
                for request in members:
                    yield num_before, request

    def skip_steps(self, num_steps: int) -> None:
        """Advance all members by `num_steps` tokens without records. `end_skipped` must follow."""
        self._step_counter.num_steps += num_steps

    def end_skipped(self, num_steps: int) -> None:
        """Update the columns after `num_steps` skipped steps."""
        self._starts = array("i", (start + num_steps for start in self._starts))

    def check_integrity(self) -> None:
        """Raise AssertionError if columns and requests differ. For tests."""
        members = self._members
        assert [member.admission for member in members] == self._order == sorted(set(self._order))
        assert self.running == sorted([*members, *self.outside], key=ADMISSION)
        assert all(member in self for member in members) and not any(
            item in self for item in self.outside
        )
        assert list(self._rows) == [member.row for member in members], (
            "the row of a request differs from its row in the decode batch"
        )
        assert list(self._starts) == [member.num_computed_tokens for member in members]
        assert [member.request_id for member in members] == self._ids
        assert all(
            member.token_ids is ids for member, ids in zip(members, self._tokens, strict=True)
        )
        for member in members:
            assert member.num_tokens_with_pending == member.num_computed_tokens + 1
            assert member in self._by_phase[self._phase(member.num_computed_tokens)], (
                "the step in which the last block of a request becomes full is wrong"
            )
            assert member in self._by_last_step[member.event_step], (
                "the step in which a request reaches its length limit is wrong"
            )
            assert member.event_step >= self._step_counter.num_steps
        assert sum(map(len, self._by_phase.values())) == len(members)
        assert sum(map(len, self._by_last_step.values())) == len(members), (
            "the decode batch keeps requests that have left it"
        )

    def _insert(self, request: Request) -> None:
        """Insert a member. The lists must not be shared with the record of a step."""
        index = bisect_left(self._order, request.admission)
        self._members.insert(index, request)
        self._order.insert(index, request.admission)
        self._ids.insert(index, request.request_id)
        self._tokens.insert(index, request.token_ids)
        self._rows.insert(index, request.row)
        self._starts.insert(index, request.num_computed_tokens)
        self._stops[request.stop_token_ids] += 1
        self._stop_ids = None
        request.use_counter(self._step_counter)
        self._by_phase[self._phase(request.num_computed_tokens)][request] = None
        num_left = request.max_total_tokens - 1 - request.num_tokens_with_pending
        request.event_step = self._step_counter.num_steps + num_left
        self._by_last_step[request.event_step][request] = None

    def _remove(self, request: Request) -> None:
        self._copy_shared_columns()
        index = bisect_left(self._order, request.admission)
        del self._by_phase[self._phase(self._starts[index])][request]
        if ending := self._by_last_step.get(request.event_step):
            ending.pop(request, None)
            if not ending:
                del self._by_last_step[request.event_step]
        for column in (self._members, self._order, self._ids, self._tokens):
            del column[index]
        del self._rows[index], self._starts[index]
        self._stops[request.stop_token_ids] -= 1
        if not self._stops[request.stop_token_ids]:
            del self._stops[request.stop_token_ids]
            self._stop_ids = None
        request.use_counter(STATIC_COUNTER)

    def _copy_shared_columns(self) -> None:
        """Copy the lists that the record of an earlier step shares, so that they can be changed."""
        if self._lent:
            self._members, self._order = self._members[:], self._order[:]
            self._ids, self._tokens = self._ids[:], self._tokens[:]
            self._rows = self._rows[:]
            self._lent = False

    def _phase(self, num_computed_tokens: int) -> int:
        """Return the step, modulo the block size, at which the member's last block is full."""
        return (self._step_counter.num_steps - num_computed_tokens) % self._block_size

    def _all_stop_ids(self) -> frozenset[int]:
        if self._stop_ids is None:
            self._stop_ids = frozenset[int]().union(*self._stops)
        return self._stop_ids


def _advanced(starts: array[int]) -> array[int]:
    """Return a copy of the positions, each increased by one. Positions are below 2**31 - 1."""
    moved = starts[:]
    increment(memoryview(moved), len(moved))
    return moved
