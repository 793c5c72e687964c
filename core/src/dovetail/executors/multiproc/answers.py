"""Answers that are on their way: handles, and the rings that they come over.

Whoever wants a result takes in what comes, for everybody: there is no thread for it, and no hop
between threads on the way of a step. Answers come in the order of the orders, so the next result is
that of the oldest step; calls go by their order's number, and an answer whose handle was given up
is dropped. Knows no order's content.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol
from weakref import WeakValueDictionary

from dovetail.clock import Clock
from dovetail.errors import EngineDeadError, MessageError, TransportError
from dovetail.executors.multiproc.launch import Workers
from dovetail.executors.output_aggregator import aggregate_outputs
from dovetail.result import ModelRunnerOutput
from dovetail.transport.columns import frame_kind
from dovetail.transport.order_frame import ANSWER, CallAnswer, decode_answer
from dovetail.transport.result_frame import decode_result

_TURN_S = 0.25
"""How long one thread waits for a frame before others may look."""


class Awaited(Protocol):
    """What is waited for. order: its number. deadline_ns: 0 for none."""

    order: int
    deadline_ns: int

    def missing_rank(self) -> int | None:
        """Return a rank that has not answered yet, or None if it is settled."""


class Answers:
    """Takes in what the workers answer. May be used by several threads."""

    def __init__(self, workers: Workers, clock: Clock, *, num_step_answers: int) -> None:
        """num_step_answers: how many ranks, from 0, answer each step."""
        self.lock = workers.reading
        self.world_size = len(workers.answers)
        self._readers = workers.answers
        self._group = workers.group
        self._clock = clock
        self._steps: list[deque[StepHandle]] = [deque() for _ in range(num_step_answers)]
        self._calls: WeakValueDictionary[int, CallHandle] = WeakValueDictionary()
        self._last_done = 0
        self._forked: EngineDeadError | None = None

    def disown(self, error: EngineDeadError) -> None:
        """In a forked child: let every call raise `error`; the rings are the parent's."""
        self._forked = error

    def await_step(self, order: int, timeout_s: float) -> StepHandle:
        """Return a handle for the step whose second half is `order`."""
        deadline_ns = self._clock.now_ns() + int(timeout_s * 1e9)
        handle = StepHandle(self, order, deadline_ns, len(self._steps))
        for steps in self._steps:
            steps.append(handle)
        return handle

    def await_call(self, order: int, rank: int | None) -> CallHandle:
        """Return a handle for the call `order`; `rank`: whose answer is wanted."""
        handle = CallHandle(self, order, rank)
        self._calls[order] = handle
        return handle

    def has_done(self, order: int) -> bool:
        """Return whether rank 0 is known to have done `order`, and all before it."""
        self.look()
        return self._last_done >= order

    def has_step(self) -> bool:
        """Return whether a step's result is still to come."""
        self.look()
        return any(self._steps)

    def is_settled(self, awaited: Awaited) -> bool:
        """Return whether `wait_for` would not wait; take in what has come."""
        self.look()
        return awaited.missing_rank() is None or self._group.is_over()

    def look(self) -> None:
        """Take in what has come, without waiting; a worker's end is told by whoever waits."""
        if self._forked is not None:
            raise self._forked
        with self.lock:
            for rank in range(self.world_size):
                while self._take(rank, 0.0):
                    pass

    def wait_for(self, awaited: Awaited, timeout_s: float | None) -> None:
        """Return when `awaited` is settled.

        Raises TimeoutError after `timeout_s` seconds, and the cause if the workers are no more.
        """
        if self._forked is not None:
            raise self._forked
        end_ns = None if timeout_s is None else self._clock.now_ns() + int(timeout_s * 1e9)
        while (rank := awaited.missing_rank()) is not None:
            now_ns = self._clock.now_ns()
            if end_ns is not None and now_ns >= end_ns:
                raise TimeoutError(f"no answer came from worker {rank} within {timeout_s} s.")
            if awaited.deadline_ns and now_ns >= awaited.deadline_ns:
                self._group.fail(
                    EngineDeadError(
                        f"worker {rank} has not done a step within its deadline, "
                        "step_timeout_s in the options of the executor."
                    )
                )
                raise self._group.cause()
            left_s = _TURN_S if end_ns is None else (end_ns - now_ns) / 1e9
            with self.lock:
                # Somebody else may have taken it in while this thread waited for its turn.
                if awaited.missing_rank() == rank and not self._take(rank, min(left_s, _TURN_S)):
                    self._check_group()

    def _check_group(self) -> None:
        if self._group.failure is not None:
            raise self._group.failure

    def _take(self, rank: int, timeout_s: float) -> bool:
        """Take in the next frame of a rank; return False if none came."""
        try:
            frame = self._readers[rank].receive(timeout_s=timeout_s)
            self._settle(rank, frame)
        except TimeoutError:
            return False
        except MessageError as error:
            self._group.fail(EngineDeadError(f"worker {rank} answers what is no answer: {error}"))
        except TransportError:
            if timeout_s:
                raise self._group.cause() from None
            return False
        return True

    def _settle(self, rank: int, frame: bytes) -> None:
        if frame_kind(frame) == ANSWER:
            answer = decode_answer(frame)
            if rank == 0:
                self._last_done = answer.number
            handle = self._calls.get(answer.number)
            if handle is not None:
                handle.settle(rank, answer)
            return
        output = decode_result(frame)
        if rank >= len(self._steps) or not self._steps[rank]:
            raise MessageError(f"a result of step {output.step_id} that nobody has asked for.")
        step = self._steps[rank].popleft()
        step.settle(rank, output)
        if rank == 0:
            self._last_done = step.order


class StepHandle:
    """A step's result. output: once it is there, put together from the ranks that answer."""

    __slots__ = ("_answers", "_by_rank", "deadline_ns", "order", "output")

    def __init__(self, answers: Answers, order: int, deadline_ns: int, num_ranks: int) -> None:
        self._answers = answers
        self._by_rank: list[ModelRunnerOutput | None] = [None] * num_ranks
        self.order = order
        self.deadline_ns = deadline_ns
        self.output: ModelRunnerOutput | None = None

    def settle(self, rank: int, output: ModelRunnerOutput) -> None:
        """Take a rank's result."""
        self._by_rank[rank] = output
        found = [one for one in self._by_rank if one is not None]
        if len(found) == len(self._by_rank):
            self.output = aggregate_outputs(found) if len(found) > 1 else output

    def missing_rank(self) -> int | None:
        """Return the first rank that has not answered."""
        return None if self.output is not None else self._by_rank.index(None)

    def done(self) -> bool:
        """Return whether the result is there, or none will come."""
        return self._answers.is_settled(self)

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Wait for the result and return it, or raise why there is none."""
        output = self.output
        while output is None:
            self._answers.wait_for(self, timeout)
            output = self.output
        return output


class CallHandle:
    """The answers of all workers to a call; `rank`: whose alone is wanted, or None."""

    __slots__ = ("__weakref__", "_answers", "_by_rank", "_rank", "deadline_ns", "order")

    def __init__(self, answers: Answers, order: int, rank: int | None) -> None:
        self._answers = answers
        self._rank = rank
        self._by_rank: dict[int, CallAnswer] = {}
        self.order = order
        self.deadline_ns = 0

    def settle(self, rank: int, answer: CallAnswer) -> None:
        """Take a rank's answer."""
        self._by_rank[rank] = answer

    def missing_rank(self) -> int | None:
        """Return the first rank that has not answered."""
        if len(self._by_rank) == self._answers.world_size:
            return None
        return next(rank for rank in range(self._answers.world_size) if rank not in self._by_rank)

    def done(self) -> bool:
        """Return whether all have answered, or will not."""
        return self._answers.is_settled(self)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answers and return them; raise the error of the first rank that has one."""
        self._answers.wait_for(self, timeout)
        found = [self._by_rank[rank] for rank in range(self._answers.world_size)]
        for rank, answer in enumerate(found):
            if answer.error is not None:
                raise answer.error.error(f"worker {rank}" if len(found) > 1 else "")
        return [one.value for one in found] if self._rank is None else found[self._rank].value
