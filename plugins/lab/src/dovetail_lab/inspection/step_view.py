"""Records a policy's view and actions in one step, without changing its decisions."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.interfaces import Policy, RequestView, SchedulerView
from dovetail.interfaces.policy import Action, Grant


@dataclass(frozen=True, kw_only=True)
class RequestState:
    """A request at the beginning of the step.

    rank: the sort key as a string; "" for a running request. num_uncomputed: tokens to compute; 0
    for a running request whose last token is pending. num_cached: tokens in the prefix cache, for a
    waiting request.
    """

    request_id: str
    tenant: str
    rank: str
    num_prompt: int
    num_output: int
    num_computed: int
    num_uncomputed: int
    num_cached: int
    num_preemptions: int


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An action of the policy and its result.

    action: "run", "preempt_and_admit", "evict", "hold" or "continue". request_id: "" for
    "continue". tokens_left, seats_left, free_blocks: before the action.
    """

    action: str
    request_id: str
    max_tokens: int
    tokens_left: int
    seats_left: int
    free_blocks: int
    grant: Grant


@dataclass(kw_only=True)
class StepView:
    """One step: the policy's view before its first action, and its actions.

    waiting: in the policy's order. running: in the order of admission. victims: requests that the
    policy chose for preemption because there were not enough free blocks. block_size: tokens per
    block.
    """

    step_id: int
    now_ns: int
    tokens_left: int
    seats_left: int
    free_blocks: int
    block_size: int
    waiting: Sequence[RequestState]
    running: Sequence[RequestState]
    attempts: list[Attempt] = field(default_factory=list)
    victims: list[str] = field(default_factory=list)


class StepObserver:
    """Observes one step of a policy. view: the recorded step; None until it is recorded."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.view: StepView | None = None

    def observe(self, policy_cls: type[Policy]) -> type[Policy]:
        """Return a subclass that makes the same decisions and records the step."""
        observer = self

        class Observed(policy_cls):  # type: ignore[misc, valid-type]  # the base is a variable
            def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
                inner: Generator[Action, Grant, None] = super().plan(view)
                if view.step_id != observer._step:
                    return inner
                return observer._follow(inner, self.rank, view)

            def victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
                chosen: RequestView = super().victim(running, view)
                if view.step_id == observer._step and observer.view is not None:
                    observer.view.victims.append(chosen.request_id)
                return chosen

        Observed.__qualname__ = policy_cls.__qualname__
        Observed.__module__ = policy_cls.__module__
        return Observed

    def _follow(
        self,
        inner: Generator[Action, Grant, None],
        rank: Callable[[RequestView, SchedulerView], Any],
        view: SchedulerView,
    ) -> Generator[Action, Grant, None]:
        seen = self.view = _seen(rank, view)
        grant: Grant | None = None
        while True:
            try:
                action = inner.send(grant)  # type: ignore[arg-type]  # None begins a generator
            except StopIteration:
                return
            before = view.tokens_left, view.seats_left, view.num_free_blocks
            grant = yield action
            seen.attempts.append(_attempt(action, before, grant))


def _seen(rank: Callable[[RequestView, SchedulerView], Any], view: SchedulerView) -> StepView:
    waiting = [_state(request, view, str(rank(request, view))) for request in view.waiting]
    return StepView(
        step_id=view.step_id,
        now_ns=view.now_ns,
        tokens_left=view.tokens_left,
        seats_left=view.seats_left,
        free_blocks=view.num_free_blocks,
        block_size=view.block_size,
        waiting=waiting,
        running=[_state(request, view, "") for request in view.running],
    )


def _state(request: RequestView, view: SchedulerView, rank: str) -> RequestState:
    return RequestState(
        request_id=request.request_id,
        tenant=request.tenant,
        rank=rank,
        num_prompt=request.num_prompt_tokens,
        num_output=request.num_output_tokens,
        num_computed=request.num_computed_tokens,
        num_uncomputed=view.num_uncomputed_tokens(request),
        num_cached=view.num_cached_tokens(request) if rank else 0,
        num_preemptions=request.num_preemptions,
    )


def _attempt(action: Action, before: tuple[int, int, int], grant: Grant) -> Attempt:
    kind, request, max_tokens, _, _ = action
    return Attempt(
        action=kind.name.lower(),
        request_id=request.request_id if request is not None else "",
        max_tokens=max_tokens,
        tokens_left=before[0],
        seats_left=before[1],
        free_blocks=before[2],
        grant=grant,
    )
