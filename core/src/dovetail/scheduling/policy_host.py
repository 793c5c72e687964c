"""The policy in charge: asked in one place, watched there, and replaced when it fails.

A policy is somebody's experiment. Strict, whatever it does wrong raises. Otherwise an exception out
of it puts `Policy` itself, first come, first served, in charge for the rest of the scheduler's
life: one line in the log, no request lost. Depends on neither rows nor blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from dovetail.errors import PolicyError
from dovetail.interfaces.policy import Policy
from dovetail.interfaces.scheduler import SchedulerContext
from dovetail.request import Request
from dovetail.scheduling.scheduler_state import SchedulerState
from dovetail.scheduling.view import View
from dovetail.scheduling.waiting_queue import HeapQueue, SortedQueue, WaitingQueue

logger = logging.getLogger(__name__)


class PolicyHost:
    """Asks a policy, and keeps the queue that it orders.

    policy, view: who is asked, and what it sees. waiting: the queue. plans, wants_granted,
    wants_output: whether the policy brings a method of its own.
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
        """The class of the policy in charge."""
        return type(self.policy).__qualname__

    def push(self, request: Request) -> None:
        """Let a request that has not run yet wait in the queue."""
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
        """Let a request wait that has lost its row, and tell the policy."""
        self.waiting.defer(request)
        try:
            self.policy.on_evict(request, num_tokens_lost, self.view)
        except Exception as error:
            self.fail("a request lost its row", error)

    def begin_step(self) -> None:
        """Bring the queue up to date."""
        try:
            self.waiting.begin_step()
        except Exception as error:
            self.fail("it ranked", error)

    def peek(self) -> Request | None:
        """Return who is to be admitted next, or None if nobody has a place in this step."""
        try:
            return self.waiting.peek()
        except Exception as error:
            self.fail("it ranked", error)
            return self.waiting.peek()

    def victim(self, candidates: Sequence[Request]) -> Request:
        """Return which of `candidates`, in order of admission, gives way.

        A policy that names somebody else has failed.
        """
        try:
            chosen = self.policy.victim(candidates, self.view)
            for request in candidates:
                if chosen is request:
                    return request
            names = [request.request_id for request in candidates]
            raise PolicyError(
                f"the policy {self.name} was asked which of {names} gives way, and returned "
                f"{chosen!r}; victim has to return one of those it is given"
            )
        except Exception as error:
            self.fail("it was asked for a victim", error)
            return candidates[-1]

    def worse_than(self, request: Request, running: Iterable[Request]) -> list[Request]:
        """Return those of `running` whose rank is worse than `request`'s."""
        rank, view = self.policy.rank, self.view
        try:
            mine = rank(request, view)
            return [one for one in running if mine < rank(one, view)]
        except Exception as error:
            self.fail("it ranked", error)
            return []

    def notify_granted(self, grants: Iterable[tuple[Request, int]]) -> None:
        """Tell the policy of the tokens that a step brings each request forward."""
        hear, view = self.policy.on_granted, self.view
        try:
            for request, num_tokens in grants:
                hear(request, num_tokens, view)
        except Exception as error:
            self.fail("it heard of a grant", error)

    def notify_output(self, news: Iterable[tuple[Request, int]]) -> None:
        """Tell the policy of the tokens that each request got."""
        hear, view = self.policy.on_output, self.view
        try:
            for request, num_tokens in news:
                hear(request, num_tokens, view)
        except Exception as error:
            self.fail("it heard of output", error)

    def notify_finished(self, request: Request) -> None:
        """Tell the policy that a request has ended."""
        try:
            self.policy.on_finish(request, self.view)
        except Exception as error:
            self.fail("it heard of an end", error)

    def refuse(self, mistake: str) -> None:
        """Count an illegal action; strict: raise PolicyError that names policy and `mistake`."""
        self.num_illegal_actions += 1
        if self.strict:
            raise PolicyError(f"the policy {self.name}, at step {self.view.step_id}: {mistake}")

    def warn_idle(self) -> None:
        """Count a step in which nothing runs though something could; warn of the first one."""
        self.num_idle_steps += 1
        if self.num_idle_steps == 1:
            logger.warning(
                "The policy %s let nothing run at step %d, though something could; if it means to, "
                "let it say work_conserving = False.",
                self.name,
                self.view.step_id,
            )

    def fail(self, when: str, error: Exception) -> None:
        """Let FCFS take charge of every request that waits; strict: raise `error` instead."""
        if self.strict:
            raise error
        self.num_failures += 1
        logger.error(
            "The policy %s failed when %s (%s: %s); from now on requests are served in the order "
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
        cls, view = type(policy), self.view
        self.policy = policy
        queue = HeapQueue if policy.static_rank else SortedQueue
        self.waiting: WaitingQueue = queue(lambda request: policy.rank(request, view))
        self.plans = cls.plan is not Policy.plan
        self.wants_granted = cls.on_granted is not Policy.on_granted
        self.wants_output = cls.on_output is not Policy.on_output
