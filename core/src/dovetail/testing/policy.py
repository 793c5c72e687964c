"""The conformance suite of the policy contract, for any policy under the core's scheduler.

The policy sees proxies that show what `RequestView` and `SchedulerView` declare and nothing more,
and that cannot be written to; its ranks and victims are watched while the scheduler suite plays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

from dovetail.interfaces.policy import Policy, RequestView, SchedulerView
from dovetail.interfaces.scheduler import SchedulerInterface
from dovetail.scheduling import Scheduler
from dovetail.testing.case import Case, run_all
from dovetail.testing.expectation import expect, judging
from dovetail.testing.policy_accounts import PolicyAccounts
from dovetail.testing.policy_programs import (
    check_newcomer,
    check_room_for_all,
    check_short_seats,
    make_referee,
)
from dovetail.testing.scheduler import scheduler_cases
from dovetail.testing.scheduler_program import Referee

NUM_PROGRAMS = 24

_OF_REQUEST = tuple(name for name in vars(RequestView) if not name.startswith("_"))
_OF_SCHEDULER = tuple(name for name in vars(SchedulerView) if not name.startswith("_"))


@judging("in the policy suite")
def check_policy(policy_cls: type[Policy], *, num_programs: int = NUM_PROGRAMS) -> None:
    """Check a policy against its whole contract; raise AssertionError with the law broken."""
    run_all(policy_cases(policy_cls, num_programs=num_programs))


def policy_cases(policy_cls: type[Policy], *, num_programs: int = NUM_PROGRAMS) -> Iterator[Case]:
    """Yield the suite's cases: its declarations, and the scheduler suite with it in charge."""
    yield Case(name="declarations", run=partial(_check_declarations, policy_cls))
    yield Case(name="room for all", run=partial(_check_room, policy_cls))
    yield Case(name="short seats", run=partial(_check_seats, policy_cls))
    yield Case(name="one newcomer", run=partial(_check_one_newcomer, policy_cls))
    yield from scheduler_cases(
        Scheduler,
        policy=_watched(policy_cls),
        keeps_prefixes=True,
        num_programs=num_programs,
        after_step=_check_after_step,
    )


def _check_declarations(policy_cls: type[Policy]) -> None:
    for name in ("static_rank", "preempts"):
        value = getattr(policy_cls, name)
        expect(isinstance(value, bool), f"{name} is {value!r}; it must be True or False")


def _check_room(policy_cls: type[Policy]) -> None:
    referee, policy = _make(policy_cls)
    check_room_for_all(referee, policy.accounts)


def _check_seats(policy_cls: type[Policy]) -> None:
    referee, policy = _make(policy_cls)
    check_short_seats(referee, policy.accounts, policy)


def _check_one_newcomer(policy_cls: type[Policy]) -> None:
    referee, policy = _make(policy_cls, depth=2)
    check_newcomer(referee, policy.accounts, policy)


def _make(policy_cls: type[Policy], *, depth: int = 1) -> tuple[Referee, _Watching]:
    referee = make_referee(_watched(policy_cls), _check_after_step, depth=depth)
    return referee, cast("_Watching", cast("Scheduler", referee.scheduler).policy)


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

    accounts: what it was told. Its own promises are held by `check_waiting`.
    """

    watched_cls: type[Policy] = Policy

    def __init__(self) -> None:
        self._policy = self.watched_cls()
        self.accounts = PolicyAccounts(static_rank=self.watched_cls.static_rank)
        self._promised: dict[str, Any] = {}
        self._view: SchedulerView | None = None

    def rank(self, request: RequestView, view: SchedulerView) -> Any:
        first = self._policy.rank(*_shown(request, view))
        again = self._policy.rank(*_shown(request, view))
        expect(first == again, f"rank of {request.request_id} is {first!r}, then {again!r}")
        for other in self.accounts.waiting:
            try:
                expect(
                    first < other.rank or other.rank <= first,
                    f"{first!r} and {other.rank!r} have no order",
                )
            except TypeError as error:
                raise AssertionError(
                    f"ranks of {request.request_id} and {other.request.request_id} cannot be "
                    f"compared: {error}"
                ) from error
        self.accounts.ranked(request, first)
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
        self._promise(request, view)
        self.accounts.arrive(request)
        self.accounts.ranked(request, self._promised[request.request_id])

    def on_granted(self, request: RequestView, num_tokens: int, view: SchedulerView) -> None:
        self.accounts.grant(request, num_tokens)
        shown, shown_view = _shown(request, view)
        self._policy.on_granted(shown, num_tokens, shown_view)

    def on_output(self, request: RequestView, num_tokens: int, view: SchedulerView) -> None:
        self.accounts.output(request, num_tokens)
        shown, shown_view = _shown(request, view)
        self._policy.on_output(shown, num_tokens, shown_view)

    def on_evict(self, request: RequestView, num_tokens_lost: int, view: SchedulerView) -> None:
        self.accounts.evict(request, num_tokens_lost)
        shown, shown_view = _shown(request, view)
        self._policy.on_evict(shown, num_tokens_lost, shown_view)
        self._promise(request, view)
        self.accounts.ranked(request, self._promised[request.request_id])

    def on_finish(self, request: RequestView, view: SchedulerView) -> None:
        self.accounts.finish(request)
        self._policy.on_finish(*_shown(request, view))

    def check_waiting(self) -> None:
        """Hold the ranks of those that wait against what `static_rank` promises."""
        if self._view is None:
            return
        self.accounts.check_view(self._view)
        for account in self.accounts.waiting if self.static_rank else ():
            name = account.request.request_id
            now = self._policy.rank(*_shown(account.request, self._view))
            expect(
                now == self._promised[name],
                f"rank of {name} was {self._promised[name]!r} and is {now!r} while it waits; "
                "static_rank promises that it never changes",
            )

    def _promise(self, request: RequestView, view: SchedulerView) -> None:
        """Note the rank with which a request begins to wait."""
        self._promised[request.request_id] = self._policy.rank(*_shown(request, view))


def _shown(request: RequestView, view: SchedulerView) -> tuple[RequestView, SchedulerView]:
    return cast("RequestView", _Proxy(request, _OF_REQUEST)), _shown_view(view)


def _shown_view(view: SchedulerView) -> SchedulerView:
    return cast("SchedulerView", _ViewProxy(view, _OF_SCHEDULER))
