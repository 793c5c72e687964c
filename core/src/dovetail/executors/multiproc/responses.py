"""Reads the workers' responses from rings, and passes them to the handles that wait for them.

A thread that waits for a result reads the rings for all waiting threads; there is no reader thread
that would delay a step's result. Responses arrive in the order of the commands, so the next result
belongs to the oldest step. Calls are found by the number of their command. A response without a
handle is dropped. This module does not depend on the content of a command.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from dovetail.clock import Clock
from dovetail.errors import EngineDeadError, MessageError, TransportError
from dovetail.executors.multiproc.launch import Workers
from dovetail.executors.output_aggregator import aggregate_outputs
from dovetail.result import ModelRunnerOutput
from dovetail.transport.columns import frame_kind
from dovetail.transport.order_frame import ANSWER, CallResult, decode_call_result
from dovetail.transport.result_frame import decode_result

_TURN_S = 0.25
"""How long one thread waits for a frame before other threads may read."""


class ResponseReader:
    """Reads the workers' responses. Thread-safe."""

    def __init__(self, workers: Workers, clock: Clock, *, num_step_responses: int) -> None:
        """Create a reader of the response rings of `workers`.

        num_step_responses: how many ranks, from rank 0, respond to each step.
        """
        self.lock = workers.reading
        self.world_size = len(workers.responses)
        self._readers = workers.responses
        self._group = workers.group
        self._clock = clock
        self._steps: list[deque[Pending]] = [deque() for _ in range(num_step_responses)]
        self._calls: WeakValueDictionary[int, Pending] = WeakValueDictionary()
        self._last_done = 0
        self._forked: EngineDeadError | None = None

    def disown(self, error: EngineDeadError) -> None:
        """Make every later call raise `error`. Runs in a forked child, which owns no ring."""
        self._forked = error

    def await_step(self, command: int, timeout_s: float) -> Pending:
        """Return a handle for a step. command: the number of the sampling command."""
        deadline_ns = self._clock.now_ns() + int(timeout_s * 1e9)
        handle = Pending(self, command, len(self._steps), _step_result, deadline_ns=deadline_ns)
        for steps in self._steps:
            steps.append(handle)
        return handle

    def await_call(self, command: int, rank: int | None) -> Pending:
        """Return a handle for a call with the number `command`. rank: the rank that responds."""
        handle = Pending(self, command, self.world_size, partial(_call_result, rank))
        self._calls[command] = handle
        return handle

    def has_done(self, command: int) -> bool:
        """Return whether rank 0 is known to have completed `command` and all earlier commands."""
        self.look()
        return self._last_done >= command

    def has_step(self) -> bool:
        """Return whether the result of a step is outstanding."""
        self.look()
        return any(self._steps)

    def is_settled(self, awaited: Pending) -> bool:
        """Return whether `wait_for` would return immediately. Read the available frames."""
        self.look()
        return awaited.missing_rank() is None or self._group.is_over()

    def look(self) -> None:
        """Read available frames without waiting. Only `wait_for` reports a worker's exit."""
        if self._forked is not None:
            raise self._forked
        with self.lock:
            for rank in range(self.world_size):
                while self._take(rank, 0.0):
                    pass

    def wait_for(self, awaited: Pending, timeout_s: float | None) -> None:
        """Wait until `awaited` has a result or an error.

        Raises TimeoutError after `timeout_s` seconds, and the workers' error if they have failed.
        """
        if self._forked is not None:
            raise self._forked
        end_ns = None if timeout_s is None else self._clock.now_ns() + int(timeout_s * 1e9)
        while (rank := awaited.missing_rank()) is not None:
            now_ns = self._clock.now_ns()
            if end_ns is not None and now_ns >= end_ns:
                raise TimeoutError(f"worker {rank} sent no response within {timeout_s} s.")
            if awaited.deadline_ns and now_ns >= awaited.deadline_ns:
                self._group.fail(
                    EngineDeadError(
                        f"worker {rank} has not completed a step within its deadline "
                        "(the executor's option step_timeout_s)."
                    )
                )
                raise self._group.cause()
            left_s = _TURN_S if end_ns is None else (end_ns - now_ns) / 1e9
            with self.lock:
                # Another thread may have read it while this one waited for the lock.
                if awaited.missing_rank() == rank and not self._take(rank, min(left_s, _TURN_S)):
                    self._check_group()

    def _check_group(self) -> None:
        if self._group.failure is not None:
            raise self._group.failure

    def _take(self, rank: int, timeout_s: float) -> bool:
        """Read the next frame of a rank. Return False if none arrived."""
        try:
            frame = self._readers[rank].receive(timeout_s=timeout_s)
            self._settle(rank, frame)
        except TimeoutError:
            return False
        except MessageError as error:
            self._group.fail(EngineDeadError(f"Worker {rank} sent an invalid response: {error}"))
        except TransportError:
            if timeout_s:
                raise self._group.cause() from None
            return False
        return True

    def _settle(self, rank: int, frame: bytes) -> None:
        if frame_kind(frame) == ANSWER:
            result = decode_call_result(frame)
            if rank == 0:
                self._last_done = result.number
            handle = self._calls.get(result.number)
            if handle is not None:
                handle.settle(rank, result)
            return
        output = decode_result(frame)
        if rank >= len(self._steps) or not self._steps[rank]:
            raise MessageError(f"received an unexpected result of step {output.step_id}.")
        step = self._steps[rank].popleft()
        step.settle(rank, output)
        if rank == 0:
            self._last_done = step.command


class Pending:
    """A handle for a command (a step or a call). Waits for the responses of the lowest ranks.

    command: the command's number. deadline_ns: when a missing response becomes a failure; 0 for
    never. finish: combines the responses into a result, or raises their error.
    """

    __slots__ = ("__weakref__", "_by_rank", "_finish", "_responses", "command", "deadline_ns")

    def __init__(
        self,
        receiver: ResponseReader,
        command: int,
        num_ranks: int,
        finish: Callable[[list[Any]], Any],
        *,
        deadline_ns: int = 0,
    ) -> None:
        self._responses = receiver
        self._by_rank: list[Any] = [None] * num_ranks
        self._finish = finish
        self.command = command
        self.deadline_ns = deadline_ns

    def settle(self, rank: int, result: ModelRunnerOutput | CallResult) -> None:
        """Store a rank's response."""
        self._by_rank[rank] = result

    def missing_rank(self) -> int | None:
        """Return the first rank that has not responded, or None if all have."""
        return self._by_rank.index(None) if None in self._by_rank else None

    def done(self) -> bool:
        """Return whether all responses have arrived, or will not arrive."""
        return self._responses.is_settled(self)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the responses. Return their combined result, or raise the error."""
        self._responses.wait_for(self, timeout)
        return self._finish(self._by_rank)


def _step_result(outputs: list[ModelRunnerOutput]) -> ModelRunnerOutput:
    return aggregate_outputs(outputs) if len(outputs) > 1 else outputs[0]


def _call_result(rank: int | None, results: list[CallResult]) -> Any:
    """Return all values, or only that of `rank`. Raise the first error."""
    for number, result in enumerate(results):
        if result.error is not None:
            raise result.error.error(f"worker {number}" if len(results) > 1 else "")
    return [item.value for item in results] if rank is None else results[rank].value
