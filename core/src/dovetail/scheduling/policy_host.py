"""Calls the active policy, checks its results, and replaces it if it fails.

In strict mode every fault of a policy raises. Otherwise an exception of the policy is logged once,
and `Policy` itself (first come, first served) replaces it for the rest of the scheduler's
lifetime; no request is lost. This module does not use batch slots or blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from dovetail.errors import PolicyError
from dovetail.interfaces.policy import Policy
from dovetail.interfaces.scheduler import SchedulerContext
from dovetail.request import Request
from dovetail.scheduling.scheduler_state import SchedulerState
from dovetail.scheduling.view import View
from dovetail.scheduling.waiting_queue import HeapQueue, Rank, SortedQueue, WaitingQueue

logger = logging.getLogger(__name__)


class PolicyHost:
    """Calls a policy and owns the queue that the policy orders.

    policy, view: the active policy, and its view of the scheduler. waiting: the queue. plans,
    wants_granted, wants_output: whether the policy overrides `plan`, `on_granted`, `on_output`.
    """

    def __init__(self, context: SchedulerContext, policy: Policy, state: SchedulerState) -> None:
        self.strict = context.strict
        self.num_failures = 0
        self.num_illegal_actions = 0
        self.num_idle_steps = 0
        self.view = View(state, lambda: self.waiting, context.seed)
        self._state = state
        self._take_charge(policy)

    @property
    def name(self) -> str:
        """The class name of the active policy."""
        return type(self.policy).__qualname__

    def push(self, request: Request) -> None:
        """Queue a request that has not run yet."""
        try:
            self.waiting.push(request)
        except Exception as error:
            self.fail("it ranked", error)

    def notify_arrival(self, request: Request) -> None:
        """Notify the policy of a new request, which is queued or held."""
        try:
            self.policy.on_arrival(request, self.view)
        except Exception as error:
            self.fail("a request arrived", error)

    def defer(self, request: Request, num_tokens_lost: int) -> None:
        """Queue a request that has lost its batch slot, and notify the policy."""
        self.waiting.defer(request)
        try:
            self.policy.on_evict(request, num_tokens_lost, self.view)
        except Exception as error:
            self.fail("handling a preemption", error)

    def begin_step(self) -> None:
        """Update the queue for a new step."""
        try:
            self.waiting.begin_step()
        except Exception as error:
            self.fail("it ranked", error)

    def peek(self) -> Request | None:
        """Return the request to be admitted next, or None if no request is ready in this step."""
        try:
            return self.waiting.peek()
        except Exception as error:
            self.fail("it ranked", error)
            return self.waiting.peek()

    def victim(self, candidates: Sequence[Request]) -> Request:
        """Return the policy's choice among `candidates`, which are in order of admission.

        A policy that returns a different request is treated as failed.
        """
        try:
            chosen = self.policy.victim(candidates, self.view)
            for request in candidates:
                if chosen is request:
                    return request
            names = [request.request_id for request in candidates]
            raise PolicyError(
                f"the policy {self.name} had to choose a victim among {names} and returned "
                f"{chosen!r}; victim must return one of its candidates"
            )
        except Exception as error:
            self.fail("choosing a victim", error)
            return candidates[-1]

    def worse_than(self, request: Request, running: Iterable[Request]) -> list[Request]:
        """Return the requests in `running` whose rank is worse than that of `request`."""
        rank = self._rank
        try:
            own_rank = rank(request)
            return [item for item in running if own_rank < rank(item)]
        except Exception as error:
            self.fail("it ranked", error)
            return []

    def notify_granted(self, grants: Iterable[tuple[Request, int]]) -> None:
        """Notify the policy of the tokens that a step computes for each request."""
        hear, view = self.policy.on_granted, self.view
        try:
            for request, num_tokens in grants:
                hear(request, num_tokens, view)
        except Exception as error:
            self.fail("handling a grant", error)

    def notify_output(self, news: Iterable[tuple[Request, int]]) -> None:
        """Notify the policy of the new tokens of each request."""
        hear, view = self.policy.on_output, self.view
        try:
            for request, num_tokens in news:
                hear(request, num_tokens, view)
        except Exception as error:
            self.fail("handling output", error)

    def notify_finished(self, request: Request) -> None:
        """Notify the policy that a request has ended."""
        try:
            self.policy.on_finish(request, self.view)
        except Exception as error:
            self.fail("handling the end of a request", error)

    def reject(self, mistake: str) -> None:
        """Count an illegal action. In strict mode, raise PolicyError, which contains `mistake`."""
        self.num_illegal_actions += 1
        if self.strict:
            raise PolicyError(
                f"the policy {self.name} violated its contract at step {self.view.step_id}: "
                f"{mistake}"
            )

    def warn_idle(self) -> None:
        """Count a step without grants in which a request could run. Warn about the first one."""
        self.num_idle_steps += 1
        if self.num_idle_steps == 1:
            logger.warning(
                "The policy %s granted nothing at step %d, although a request could run. If this "
                "is intended, set work_conserving = False in the policy.",
                self.name,
                self.view.step_id,
            )

    def fail(self, when: str, error: Exception) -> None:
        """Replace the policy with FCFS for all waiting requests. In strict mode, raise `error`."""
        if self.strict:
            raise error
        self.num_failures += 1
        logger.error(
            "The policy %s failed while %s (%s: %s); from now on requests are served in the order "
            "of their arrival.",
            self.name,
            when,
            type(error).__name__,
            error,
            exc_info=error,
        )
        self._take_charge(Policy())
        state = self._state
        evicted = state.draft.evicted
        for request in state.requests.values():
            if request.row >= 0 or request in state.held_requests or request in state.loads:
                continue
            (self.waiting.defer if request in evicted else self.waiting.push)(request)

    def _take_charge(self, policy: Policy) -> None:
        cls = type(policy)
        self.policy = policy
        self._rank = _rank_of(policy, self.view)
        queue = HeapQueue if policy.static_rank else SortedQueue
        self.waiting: WaitingQueue = queue(self._rank)
        self.plans = cls.plan is not Policy.plan
        self.wants_granted = cls.on_granted is not Policy.on_granted
        self.wants_output = cls.on_output is not Policy.on_output


def _rank_of(policy: Policy, view: View) -> Rank:
    """Return the policy's `rank`, which raises PolicyError for a rank with NaN: it has no order."""
    rank = policy.rank
    if type(policy).rank is Policy.rank:
        return lambda request: rank(request, view)

    def checked(request: Request) -> Any:
        value = rank(request, view)
        for part in value if type(value) is tuple else (value,):
            if part != part:
                raise PolicyError(
                    f"the policy {type(policy).__qualname__} returned the rank {value!r} for the "
                    f"request {request.request_id!r}; a rank must not be NaN, because NaN has no "
                    "order"
                )
        return value

    return checked
