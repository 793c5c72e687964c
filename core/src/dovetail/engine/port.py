"""Declares, once, every engine operation that a front end can call.

An operation is a method of `EnginePort`: its signature declares the arguments and the result, and
`EngineCore` has a method of the same name that implements it. Everything else is derived from the
declaration: the sync and the async client, the message that carries a call to another process, its
checks there, and the dispatch. To add an operation, declare it here and implement it in
`EngineCore`.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from dovetail.engine.operation import Operation, operation
from dovetail.engine.step_trace.records import MAX_STEPS, StepTrace
from dovetail.errors import RequestError
from dovetail.interfaces.scheduler import PauseScope, SchedulerStats
from dovetail.request import EngineCoreRequest

MAX_NAME_CHARS = 256
WorkerOperation = Annotated[
    str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS, pattern="^[^:]*$")
]
"""The name of a worker's method. "pkg.mod:function" is accepted only by an in-process engine: a
message to another process could otherwise call any function."""


class EnginePort:
    """The operations of an engine core. Outputs are returned by `get_outputs` of the clients.

    In an async client every method is a coroutine function. All but `abort_requests` raise
    EngineDeadError once the engine has failed, and UnavailableError while a supervised engine is
    being restarted. Pause, sleep and prefix cache are properties of the engine: they concern all
    clients.
    """

    @operation(expects_response=False)
    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request, without waiting for the engine.

        Raises RequestError if it is rejected immediately. A rejection by another process is
        reported with the outputs: a `Finished` with the reason ERROR and the rejection as its
        message.
        """

    @operation()
    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> dict[str, RequestError]:
        """Send requests, all before the next step. Return the rejections by id."""

    @operation()
    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Abort requests immediately. Unknown ids and ids of other clients are ignored."""

    @operation()
    def pause(self, scope: PauseScope) -> None:
        """Pause all requests (ALL) or only new ones (NEW). Requests can be added and aborted."""

    @operation()
    def resume(self) -> None:
        """Continue after a pause, if there is one. Raises UserError while the engine sleeps."""

    @operation()
    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Return False if requests are unfinished."""

    @operation()
    def sleep(self, level: int = 1) -> None:
        """Free device memory. Requests wait until `wake_up`.

        level: 1 keeps the weights in host memory, 2 drops them. Raises UserError if a worker does
        not provide "sleep", or requests are unfinished.
        """

    @operation()
    def wake_up(self, tags: tuple[str, ...] = ()) -> None:
        """Allocate memory again after `sleep`. tags: "weights", "kv_cache". Empty for all."""

    @operation()
    def call_workers(
        self,
        operation: WorkerOperation | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker. Return the results in the order of the ranks.

        An in-process engine also accepts a callable, which gets the worker as its argument. With an
        engine in another process, arguments and results are plain data: a dataclass is returned as
        a dict. Raises UserError if the operation cannot be called, DovetailError if the call fails.
        """

    @operation()
    def get_stats(self) -> SchedulerStats | None:
        """Return the scheduler's statistics of the latest step, None before the first."""

    @operation()
    def read_steps(self, after: int = 0, max_steps: int = MAX_STEPS) -> StepTrace:
        """Return what each request did in the steps with numbers above `after`.

        The first call starts the recording, which ends if no client calls for 10 s. The
        engine stores the last `MAX_STEPS` steps, for all clients together. Raises UserError for an
        invalid argument.
        """

    @operation()
    def check_health(self) -> None:
        """Raise EngineDeadError if the engine has failed, even if no request is running."""


OPERATIONS: dict[str, Operation[..., Any]] = {
    name: member for name, member in vars(EnginePort).items() if isinstance(member, Operation)
}
"""All operations by name."""
