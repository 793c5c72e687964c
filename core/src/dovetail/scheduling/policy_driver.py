"""Runs a policy's generator for one step and passes each legal action to the mechanism.

An action is legal if it concerns an unfinished request of this scheduler, if the state of the
request allows it, and if the request has neither a grant nor a hold in this step. The mechanism
decides what it grants to a legal action. If the policy raises, it is replaced (`policy_host`), and
the rest of the step is first come, first served.
"""

from __future__ import annotations

from dovetail.errors import PolicyError
from dovetail.interfaces.policy import ActionKind, Denied, Grant
from dovetail.request import Request
from dovetail.scheduling.grants import DENIALS, DONE
from dovetail.scheduling.mechanism import Mechanism
from dovetail.scheduling.policy_host import PolicyHost
from dovetail.scheduling.scheduler_state import SchedulerState

_RUN, _PREEMPT_AND_ADMIT, _EVICT, _HOLD, _CONTINUE = ActionKind
_ACTIONS_PER_REQUEST = 8
"""A policy may yield this many actions per unfinished request in a step, plus a constant."""


class PolicyDriver:
    """Runs the generator of `Policy.plan` for the step that is being planned."""

    def __init__(self, state: SchedulerState, mechanism: Mechanism, host: PolicyHost) -> None:
        self._state = state
        self._mechanism = mechanism
        self._host = host

    def plan_step(self) -> None:
        """Let the policy plan the current step."""
        host, mechanism = self._host, self._mechanism
        policy = host.policy
        self._follow()
        if host.policy is not policy:
            self._state.draft.held.clear()
            mechanism.continue_running()
            mechanism.admit_waiting()
        elif self._state.draft.empty and policy.work_conserving:
            self._use_step()

    def _use_step(self) -> None:
        """Handle a step in which the policy granted nothing.

        After a preemption, running requests continue. Otherwise warn if a request could run.
        """
        mechanism = self._mechanism
        if mechanism.under_pressure:
            mechanism.continue_running()  # uses blocks that a preempted request has freed
        elif mechanism.can_grant():
            self._host.warn_idle()

    def _follow(self) -> None:
        """Grant or deny each action until the policy ends its plan or is replaced."""
        host = self._host
        policy = host.policy
        maximum = 64 + _ACTIONS_PER_REQUEST * len(self._state.requests)
        grant: Grant | None = None
        try:
            send = policy.plan(host.view).send
        except Exception as error:
            host.fail("planning a step", error)
            return
        for _ in range(maximum):
            try:
                action = send(grant)  # type: ignore[arg-type]  # None begins a generator
            except StopIteration:
                return
            except Exception as error:
                host.fail("planning a step", error)
                return
            grant = self._answer(action)
            if host.policy is not policy:
                return
        endless = PolicyError(f"the policy {host.name} yielded {maximum} actions in one step")
        host.fail("planning a step", endless)

    def _answer(self, action: object) -> Grant:
        if type(action) is not tuple or len(action) != 5:
            return self._reject(
                action, "the value is not an action; use Run, PreemptAndAdmit, Evict or Hold"
            )
        kind, request, max_tokens, reserve, whole = action
        if kind is _CONTINUE:
            return self._mechanism.continue_running()
        if not isinstance(request, Request) or (
            self._state.requests.get(request.request_id) is not request
        ):
            return self._reject(action, "this scheduler has no such request")
        draft = self._state.draft
        if request in draft.held:
            return self._reject(action, "the request is held in this step")
        if kind is _EVICT:
            return self._evict(request, action)
        if draft.has_grant(request):
            return self._reject(action, "the request already has a grant in this step")
        if kind is _RUN:
            return self._run(request, max_tokens, reserve, whole)
        if kind is _HOLD:
            return self._hold(request, action)
        if kind is _PREEMPT_AND_ADMIT:
            return self._preempt_and_admit(request, max_tokens)
        return self._reject(action, f"{kind!r} is not a kind of action")

    def _run(self, request: Request, max_tokens: object, reserve: object, whole: object) -> Grant:
        if not (_is_count(max_tokens) and _is_count(reserve)):
            action = (_RUN, request, max_tokens, reserve, whole)
            return self._reject(action, "max_tokens and reserve must be integers of at least 0")
        if self._is_held(request):
            return DENIALS[Denied.NOT_READY]
        do = self._mechanism.run if request.row >= 0 else self._mechanism.admit
        return do(request, max_tokens, reserve, bool(whole))  # type: ignore[arg-type]

    def _preempt_and_admit(self, request: Request, max_tokens: object) -> Grant:
        action = (_PREEMPT_AND_ADMIT, request, max_tokens)
        if request.row >= 0:
            return self._reject(action, "the request is already running")
        if not _is_count(max_tokens):
            return self._reject(action, "max_tokens must be an integer of at least 0")
        if self._is_held(request):
            return DENIALS[Denied.NOT_READY]
        return self._mechanism.preempt_and_admit(request, max_tokens)  # type: ignore[arg-type]

    def _is_held(self, request: Request) -> bool:
        """Return whether `request` waits for a gate, the end of a pause, or loads."""
        state = self._state
        return request.row < 0 and (request in state.held_requests or request in state.loads)

    def _evict(self, request: Request, action: object) -> Grant:
        if request.row < 0:
            return self._reject(action, "the request is not running")
        self._mechanism.evict(request)
        return DONE

    def _hold(self, request: Request, action: object) -> Grant:
        if request.row < 0:
            return self._reject(action, "the request is not running")
        self._mechanism.hold(request)
        return DONE

    def _reject(self, action: object, why: str) -> Grant:
        self._host.reject(f"the action {action!r} is illegal: {why}")
        return DENIALS[Denied.ILLEGAL]


def _is_count(number: object) -> bool:
    return type(number) is int and number >= 0
