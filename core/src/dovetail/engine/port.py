"""The engine port: every operation that a front end can call, declared once.

An operation is a method of `EnginePort`: its signature says which arguments it takes and what it
returns, and `EngineCore` has a method of the same name that does it. All else is derived from the
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
from dovetail.errors import RequestError
from dovetail.interfaces.scheduler import PauseScope, SchedulerStats
from dovetail.request import EngineCoreRequest

MAX_NAME_CHARS = 256
WorkerOperation = Annotated[
    str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS, pattern="^[^:]*$")
]
"""The name of a worker's method. "pkg.mod:function" is for an engine in this process only: in the
engine's process it could be any function."""


class EnginePort:
    """What an engine core can be asked to do. Outputs come by `get_outputs` of the clients.

    Through an async client every method is a coroutine function. All but `abort_requests` raise
    EngineDeadError once the engine cannot go on, and UnavailableError while a supervised engine is
    being started again. Pause, sleep and the prefix cache are the engine's: they concern all
    clients.
    """

    @operation(answered=False)
    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand a request over, without waiting for the engine.

        Raises RequestError if it is refused at once. A refusal that only another process knows
        comes with the outputs: a `Finished` with the reason ERROR and the refusal as its message.
        """

    @operation()
    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> dict[str, RequestError]:
        """Hand requests over, all before the next step; return the refusals by id."""

    @operation()
    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests at once. Unknown ids, and those of other clients, are ignored."""

    @operation()
    def pause(self, scope: PauseScope) -> None:
        """Hold requests: ALL runs nothing, NEW admits nobody. Requests may come and go."""

    @operation()
    def resume(self) -> None:
        """Lift a pause; do nothing if there is none. Raises UserError while the engine sleeps."""

    @operation()
    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes; return False if requests are under way."""

    @operation()
    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back; requests wait until `wake_up`.

        level: 1 keeps the weights in host memory, 2 drops them. Raises UserError if a worker does
        not provide "sleep", or requests are under way.
        """

    @operation()
    def wake_up(self, tags: tuple[str, ...] = ()) -> None:
        """Take memory again after `sleep`. tags: "weights", "kv_cache"; empty for all."""

    @operation()
    def call_workers(
        self,
        operation: WorkerOperation | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker by name; return the answers by rank.

        In process also a callable, which is given the worker. Over a process arguments and answers
        are plain data: a dataclass comes back as a dict. Raises UserError for what cannot be called
        from here, DovetailError for what the call raised there.
        """

    @operation()
    def get_stats(self) -> SchedulerStats | None:
        """Return the scheduler's statistics of the latest step, None before the first."""

    @operation()
    def check_health(self) -> None:
        """Raise EngineDeadError if the engine cannot go on, though nothing runs."""


OPERATIONS: dict[str, Operation[..., Any]] = {
    name: found for name, found in vars(EnginePort).items() if isinstance(found, Operation)
}
"""All operations by name."""
