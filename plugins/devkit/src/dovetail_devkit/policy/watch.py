"""A wrapper that gives a policy proxies of its arguments, and checks its results.

The proxies are read-only and show only what `RequestView` and `SchedulerView` declare. The wrapper
checks ranks and victims. The scheduler in strict mode checks whether actions are legal.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any, cast

from dovetail.interfaces.policy import Action, Grant, Policy, RequestView, SchedulerView
from dovetail_devkit.expectation import expect
from dovetail_devkit.policy.accounts import PolicyAccounts

_OF_REQUEST = frozenset(name for name in vars(RequestView) if not name.startswith("_"))
_OF_SCHEDULER = frozenset(name for name in vars(SchedulerView) if not name.startswith("_"))


class _Proxy:
    """A read-only proxy with some attributes of an object."""

    __slots__ = ("_shown", "_target")

    def __init__(self, target: object, shown: frozenset[str]) -> None:
        object.__setattr__(self, "_target", target)
        object.__setattr__(self, "_shown", shown)

    def __getattr__(self, name: str) -> Any:
        expect(
            name in self._shown,
            f"the policy reads the attribute {name!r} of a view, but a view has only "
            f"{sorted(self._shown)}",
        )
        return getattr(self._target, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AssertionError(
            f"the policy sets the attribute {name!r} of a view, but views are read-only"
        )


class _Waiting(Sequence[Any]):
    """A live view of the scheduler's waiting requests, as proxies."""

    def __init__(self, requests: Sequence[RequestView], proxies: ReadOnlyProxies) -> None:
        self._requests = requests
        self._proxies = proxies

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestView]:
        return map(self._proxies.request, self._requests)

    def __getitem__(self, index: Any) -> Any:
        selected = self._requests[index]
        return (
            self._proxies.all(selected)
            if isinstance(index, slice)
            else self._proxies.request(selected)
        )


class _ViewProxy(_Proxy):
    """A proxy of a `SchedulerView`, which returns proxies of requests."""

    __slots__ = ("_proxies",)

    def __init__(self, target: SchedulerView, proxies: ReadOnlyProxies) -> None:
        super().__init__(target, _OF_SCHEDULER)
        object.__setattr__(self, "_proxies", proxies)

    @property
    def running(self) -> Sequence[RequestView]:
        return cast("Sequence[RequestView]", self._proxies.all(self._target.running))

    @property
    def waiting(self) -> Sequence[RequestView]:
        return _Waiting(self._target.waiting, self._proxies)

    def num_cached_tokens(self, request: Any) -> int:
        return cast("int", self._target.num_cached_tokens(self._proxies.lift(request)))

    def num_uncomputed_tokens(self, request: Any) -> int:
        return cast("int", self._target.num_uncomputed_tokens(self._proxies.lift(request)))


class ReadOnlyProxies:
    """Converts objects to proxies and back, between a policy and a scheduler.

    Each request has one proxy.
    """

    def __init__(self) -> None:
        self._proxies: dict[int, _Proxy] = {}
        self._views: dict[int, _ViewProxy] = {}

    def request(self, request: RequestView) -> RequestView:
        """Return the proxy of a request."""
        proxy = self._proxies.get(request.sequence)
        if proxy is None or proxy._target is not request:
            proxy = self._proxies[request.sequence] = _Proxy(request, _OF_REQUEST)
        return cast("RequestView", proxy)

    def all(self, requests: Sequence[RequestView]) -> tuple[RequestView, ...]:
        """Return the proxies of several requests."""
        return tuple(map(self.request, requests))

    def view(self, view: SchedulerView) -> SchedulerView:
        """Return the proxy of a view."""
        proxy = self._views.get(id(view))
        if proxy is None:
            proxy = self._views[id(view)] = _ViewProxy(view, self)
        return cast("SchedulerView", proxy)

    def both(self, request: RequestView, view: SchedulerView) -> tuple[RequestView, SchedulerView]:
        """Return the proxies of a request and a view."""
        return self.request(request), self.view(view)

    def lift(self, shown: Any) -> Any:
        """Return the object that a proxy represents. Return other values unchanged."""
        return shown._target if isinstance(shown, _Proxy) else shown

    def action(self, action: Any) -> Any:
        """Return an action with the request that its proxy represents.

        Returns other values unchanged.
        """
        if type(action) is not tuple or len(action) != 5:
            return action
        kind, request, *rest = action
        return (kind, self.lift(request), *rest)


class WatchedPolicy(Policy):
    """Delegates to a policy of `watched_cls`, and checks its results.

    accounts: the events that the policy received.
    """

    watched_cls: type[Policy] = Policy

    def __init__(self) -> None:
        self.watched = self.watched_cls()
        self.proxies = ReadOnlyProxies()
        self.accounts = PolicyAccounts(
            static_rank=self.watched_cls.static_rank, plans=plans(self.watched_cls)
        )
        self._promised: dict[str, Any] = {}
        self._view: SchedulerView | None = None

    def rank(self, request: RequestView, view: SchedulerView) -> Any:
        """Call the policy's `rank` twice. Check that it can be compared with other ranks."""
        first = self.watched.rank(*self.proxies.both(request, view))
        again = self.watched.rank(*self.proxies.both(request, view))
        expect(
            first == again,
            f"two calls of rank for {request.request_id} return {first!r} and {again!r}; they must "
            "be equal",
        )
        for other in self.accounts.waiting:
            try:
                expect(
                    first < other.rank or other.rank <= first,
                    f"the ranks {first!r} and {other.rank!r} cannot be ordered",
                )
            except TypeError as error:
                raise AssertionError(
                    f"the ranks of {request.request_id} and {other.request.request_id} cannot be "
                    f"compared: {error}"
                ) from error
        self.accounts.ranked(request, first)
        return first

    def victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        """Call the policy's `victim`. Return the request that the chosen proxy represents."""
        shown = self.proxies.all(running)
        chosen = self.watched.victim(shown, self.proxies.view(view))
        for request, proxy in zip(running, shown, strict=True):
            if chosen is proxy:
                return request
        raise AssertionError(f"victim() returns {chosen!r}, which is not a request of its argument")

    def on_arrival(self, request: RequestView, view: SchedulerView) -> None:
        """Record the arrival of a request."""
        self._view = view
        self.watched.on_arrival(*self.proxies.both(request, view))
        self._promise(request, view)
        self.accounts.arrive(request)
        self.accounts.ranked(request, self._promised[request.request_id])

    def on_granted(self, request: RequestView, num_tokens: int, view: SchedulerView) -> None:
        """Record a grant of tokens."""
        self.accounts.grant(request, num_tokens, view.block_size)
        shown, shown_view = self.proxies.both(request, view)
        self.watched.on_granted(shown, num_tokens, shown_view)

    def on_output(self, request: RequestView, num_tokens: int, view: SchedulerView) -> None:
        """Record output tokens."""
        self.accounts.output(request, num_tokens)
        shown, shown_view = self.proxies.both(request, view)
        self.watched.on_output(shown, num_tokens, shown_view)

    def on_evict(self, request: RequestView, num_tokens_lost: int, view: SchedulerView) -> None:
        """Record an eviction."""
        self.accounts.evict(request, num_tokens_lost)
        shown, shown_view = self.proxies.both(request, view)
        self.watched.on_evict(shown, num_tokens_lost, shown_view)
        self._promise(request, view)
        self.accounts.ranked(request, self._promised[request.request_id])

    def on_finish(self, request: RequestView, view: SchedulerView) -> None:
        """Record the end of a request."""
        self.accounts.finish(request)
        self.watched.on_finish(*self.proxies.both(request, view))

    def check_waiting(self) -> None:
        """Check that ranks of waiting requests do not change if the policy declares static_rank."""
        if self._view is None:
            return
        self.accounts.check_view(self._view)
        for account in self.accounts.waiting if self.static_rank else ():
            name = account.request.request_id
            now = self.watched.rank(*self.proxies.both(account.request, self._view))
            expect(
                now == self._promised[name],
                f"the rank of {name} changes from {self._promised[name]!r} to {now!r} while it "
                "waits, but the policy declares static_rank",
            )

    def _promise(self, request: RequestView, view: SchedulerView) -> None:
        """Record the rank of a request that starts to wait."""
        self._promised[request.request_id] = self.watched.rank(*self.proxies.both(request, view))


class WatchedPlan(WatchedPolicy):
    """A checked policy that overrides `plan`, and forwards each action to the scheduler."""

    def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
        """Forward the actions, and return the grants."""
        actions = self.watched.plan(self.proxies.view(view))
        expect(isinstance(actions, Generator), f"plan() returns {actions!r}; expected a generator")
        grant: Any = None
        while True:
            try:
                action = actions.send(grant)
            except StopIteration:
                return
            grant = yield self.proxies.action(action)


def plans(policy_cls: type[Policy]) -> bool:
    """Return whether a policy overrides `plan`."""
    return policy_cls.plan is not Policy.plan


def watch(policy_cls: type[Policy], *, by_plan: bool = False) -> type[WatchedPolicy]:
    """Return a subclass of `WatchedPolicy` for `policy_cls`.

    by_plan: run the default plan action by action if the policy does not override `plan`.
    """
    base = WatchedPlan if by_plan or plans(policy_cls) else WatchedPolicy
    declared = {
        name: getattr(policy_cls, name) for name in ("static_rank", "preempts", "work_conserving")
    }
    return type("Watched" + policy_cls.__name__, (base,), {"watched_cls": policy_cls, **declared})
