"""The conformance suite of the policy contract, for any policy under the core's scheduler.

The policy sees proxies that show what `RequestView` and `SchedulerView` declare and nothing more,
and that cannot be written to; its ranks and victims are watched while the scheduler suite plays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from dovetail.interfaces.policy import Policy, RequestView, SchedulerView
from dovetail.interfaces.scheduler import SchedulerInterface
from dovetail.scheduling import Scheduler
from dovetail.testing.case import Case, run_all
from dovetail.testing.expectation import expect, judging
from dovetail.testing.scheduler import scheduler_cases

NUM_PROGRAMS = 24

_OF_REQUEST = tuple(name for name in vars(RequestView) if not name.startswith("_"))
_OF_SCHEDULER = tuple(name for name in vars(SchedulerView) if not name.startswith("_"))


@judging("in the policy suite")
def check_policy(policy_cls: type[Policy], *, num_programs: int = NUM_PROGRAMS) -> None:
    """Check a policy against its whole contract; raise AssertionError with the law broken."""
    run_all(policy_cases(policy_cls, num_programs=num_programs))


def policy_cases(policy_cls: type[Policy], *, num_programs: int = NUM_PROGRAMS) -> Iterator[Case]:
    """Yield the suite's cases: its declarations, and the scheduler suite with it in charge."""
    yield Case(name="declarations", run=lambda: _check_declarations(policy_cls))
    yield from scheduler_cases(
        Scheduler,
        policy=_watched(policy_cls),
        num_programs=num_programs,
        after_step=_check_after_step,
    )


def _check_declarations(policy_cls: type[Policy]) -> None:
    for name in ("static_rank", "preempts"):
        value = getattr(policy_cls, name)
        expect(isinstance(value, bool), f"{name} is {value!r}; it must be True or False")


def _check_after_step(scheduler: SchedulerInterface) -> None:
    core = cast("Scheduler", scheduler)
    core.check_integrity()
    cast("_Watching", core.policy).check_waiting()


class _Proxy:
    """Shows some attributes of an object; to read, never to write."""

    __slots__ = ("_shown", "_target")

    def __init__(self, target: object, shown: tuple[str, ...]) -> None:
        object.__setattr__(self, "_target", target)
        object.__setattr__(self, "_shown", shown)

    def __getattr__(self, name: str) -> Any:
        expect(name in self._shown, f"the policy reads {name!r}; it may see {self._shown}")
        return getattr(self._target, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AssertionError(f"the policy writes to {name!r}; a view is to read")


class _ViewProxy(_Proxy):
    """A scheduler's view whose requests are proxies, too."""

    __slots__ = ()

    @property
    def running(self) -> Sequence[Any]:
        return tuple(_Proxy(request, _OF_REQUEST) for request in self._target.running)

    def num_cached_tokens(self, request: Any) -> int:
        target = request._target if isinstance(request, _Proxy) else request
        count: int = self._target.num_cached_tokens(target)
        return count


def _watched(policy_cls: type[Policy]) -> type[Policy]:
    """Return a policy that does what `policy_cls` does, under the eyes of the suite."""

    class Watched(_Watching):
        watched_cls = policy_cls
        static_rank = policy_cls.static_rank
        preempts = policy_cls.preempts

    return Watched


class _Watching(Policy):
    """Hands proxies to a policy of `watched_cls`, and holds what comes back against the law.

    _waiting: requests without a row, by id, with the rank that each had when it began to wait.
    """

    watched_cls: type[Policy] = Policy

    def __init__(self) -> None:
        self._policy = self.watched_cls()
        self._waiting: dict[str, tuple[RequestView, Any]] = {}
        self._view: SchedulerView | None = None

    def rank(self, request: RequestView, view: SchedulerView) -> Any:
        first = self._policy.rank(*_shown(request, view))
        again = self._policy.rank(*_shown(request, view))
        expect(first == again, f"rank of {request.request_id} is {first!r}, then {again!r}")
        for name, (_, other) in self._waiting.items():
            try:
                expect(first < other or other <= first, f"{first!r} and {other!r} have no order")
            except TypeError as error:
                raise AssertionError(
                    f"ranks of {request.request_id} and {name} cannot be compared: {error}"
                ) from error
        return first

    def victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        shown = tuple(_Proxy(request, _OF_REQUEST) for request in running)
        chosen = self._policy.victim(cast("Sequence[RequestView]", shown), _shown_view(view))
        for request, proxy in zip(running, shown, strict=True):
            if chosen is proxy:
                return request
        raise AssertionError(f"victim returns {chosen!r}, which is none of those that run")

    def on_arrival(self, request: RequestView, view: SchedulerView) -> None:
        self._view = view
        self._policy.on_arrival(*_shown(request, view))
        self._wait(request, view)

    def on_granted(self, request: RequestView, num_tokens: int, view: SchedulerView) -> None:
        self._waiting.pop(request.request_id, None)
        shown, shown_view = _shown(request, view)
        self._policy.on_granted(shown, num_tokens, shown_view)

    def on_output(self, request: RequestView, num_tokens: int, view: SchedulerView) -> None:
        shown, shown_view = _shown(request, view)
        self._policy.on_output(shown, num_tokens, shown_view)

    def on_evict(self, request: RequestView, num_tokens_lost: int, view: SchedulerView) -> None:
        shown, shown_view = _shown(request, view)
        self._policy.on_evict(shown, num_tokens_lost, shown_view)
        self._wait(request, view)

    def on_finish(self, request: RequestView, view: SchedulerView) -> None:
        self._waiting.pop(request.request_id, None)
        self._policy.on_finish(*_shown(request, view))

    def check_waiting(self) -> None:
        """Hold the ranks of those that wait against what `static_rank` promises."""
        if not self.static_rank or self._view is None:
            return
        for name, (request, rank) in self._waiting.items():
            now = self._policy.rank(*_shown(request, self._view))
            expect(
                now == rank,
                f"rank of {name} was {rank!r} and is {now!r} while it waits; static_rank promises "
                "that it never changes",
            )

    def _wait(self, request: RequestView, view: SchedulerView) -> None:
        rank = self._policy.rank(*_shown(request, view))
        self._waiting[request.request_id] = request, rank


def _shown(request: RequestView, view: SchedulerView) -> tuple[RequestView, SchedulerView]:
    return cast("RequestView", _Proxy(request, _OF_REQUEST)), _shown_view(view)


def _shown_view(view: SchedulerView) -> SchedulerView:
    return cast("SchedulerView", _ViewProxy(view, _OF_SCHEDULER))
