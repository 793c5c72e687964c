"""The contract of a scheduling policy: the policy proposes actions, the scheduler grants them.

A policy orders requests, selects preemption victims and can plan whole steps. It never changes
batch slots, blocks, budgets or plans: those belong to the scheduler
(`dovetail.scheduling.Scheduler`). All methods have defaults, so the smallest policy is one method.
A policy is pure Python. Its only clock is `SchedulerView.now_ns`, and its only source of random
numbers is `SchedulerView.rng`.

Override `rank` to order admission; the scheduler then runs a fast inlined loop. Override `victim`
to select the request that is preempted when blocks run out. Override `plan`, a generator, to
control the whole step: it yields actions and receives a `Grant` for each. Override the `on_…`
hooks to keep statistics about requests.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dovetail.retired_names import reject_retired
from dovetail.sampling_params import SamplingParams


class RequestView(Protocol):
    """A policy's read-only view of a request."""

    @property
    def request_id(self) -> str:
        """The id of the request, unique in the engine core."""

    @property
    def sequence(self) -> int:
        """The request's index in the order of arrival. Unique, lower for earlier requests."""

    @property
    def priority(self) -> int:
        """The user's priority. Lower is served first."""

    @property
    def tenant(self) -> str:
        """The tenant that the user named. Empty for none."""

    @property
    def arrival_ns(self) -> int:
        """Time at which the request arrived, in nanoseconds of the engine's clock."""

    @property
    def deadline_ns(self) -> int:
        """Deadline of the first token, in nanoseconds of the engine's clock, or 0 for none."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far. The final number is not known in advance."""

    @property
    def max_total_tokens(self) -> int:
        """Maximum length of the request in tokens, prompt included."""

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose keys and values are in the cache."""

    @property
    def num_preemptions(self) -> int:
        """Number of times that the request was preempted."""

    @property
    def cache_salt(self) -> str:
        """Salt of the request's block hashes. Only requests with the same salt share prefixes."""

    @property
    def sampling_params(self) -> SamplingParams:
        """The sampling parameters of the request."""


class SchedulerView(Protocol):
    """A policy's read-only view of the scheduler. It reflects the actions granted so far."""

    @property
    def now_ns(self) -> int:
        """The time of this step, in nanoseconds of the engine's clock."""

    @property
    def step_id(self) -> int:
        """The id of the step that is being planned."""

    @property
    def rng(self) -> Random:
        """A random number generator for this policy, seeded by the engine."""

    @property
    def running(self) -> Sequence[RequestView]:
        """Requests that hold a batch slot, in the order of their admission."""

    @property
    def waiting(self) -> Sequence[RequestView]:
        """Requests without a batch slot that may be admitted now, in the order of `rank`.

        Requests that wait for a gate, a resume or a KV-cache load are not included.
        """

    @property
    def num_waiting(self) -> int:
        """Number of requests without a batch slot, including those that `waiting` omits."""

    @property
    def tokens_left(self) -> int:
        """Number of tokens of this step's budget that are not granted yet."""

    @property
    def seats_left(self) -> int:
        """Number of free batch slots."""

    @property
    def num_free_blocks(self) -> int:
        """Number of KV blocks that can be allocated now."""

    @property
    def block_size(self) -> int:
        """Number of tokens per block."""

    def num_cached_tokens(self, request: RequestView) -> int:
        """Return how many tokens of the request the prefix cache holds. Changes nothing."""

    def num_uncomputed_tokens(self, request: RequestView) -> int:
        """Return the number of known or pending tokens that are not computed yet.

        1 for a request that decodes; 0 if its last token is pending. For a waiting request, tokens
        in the prefix cache are not counted.
        """


class ActionKind(IntEnum):
    """The kind of an action: its first field."""

    RUN = 0
    PREEMPT_AND_ADMIT = 1
    EVICT = 2
    HOLD = 3
    CONTINUE = 4


Action = tuple[ActionKind, RequestView | None, int, int, bool]
"""An action: (kind, request, max_tokens, reserve, whole).

Create actions with `Run`, `PreemptAndAdmit`, `Evict`, `Hold` and `CONTINUE`. Actions are tuples
because objects would more than double the cost of a step.
"""


def Run(  # noqa: N802  # named like a class, because it constructs an action
    request: RequestView, max_tokens: int = 0, *, reserve: int = 0, whole: bool = False
) -> Action:
    """Return the action that computes tokens of a running or waiting request in this step.

    max_tokens: maximum number of tokens to compute; 0 for all uncomputed tokens.
    reserve: total number of tokens, prompt included, to allocate blocks for; 0 for the computed
    tokens only. whole: whether to compute all of these tokens or none.
    """
    return ActionKind.RUN, request, max_tokens, reserve, whole


def PreemptAndAdmit(request: RequestView, max_tokens: int = 0) -> Action:  # noqa: N802
    """Return the action that admits a waiting request and preempts others of worse rank if needed.

    The scheduler preempts victims (`Policy.victim`) until the request fits. If it cannot fit, no
    request is preempted.
    """
    return ActionKind.PREEMPT_AND_ADMIT, request, max_tokens, 0, False


def Evict(request: RequestView) -> Action:  # noqa: N802
    """Return the action that preempts a running request.

    The request waits again, without batch slot and blocks. Tokens that were granted to it in this
    step are revoked.
    """
    return ActionKind.EVICT, request, 0, 0, False


def Hold(request: RequestView) -> Action:  # noqa: N802
    """Return the action that pauses a running request, which keeps its batch slot and blocks."""
    return ActionKind.HOLD, request, 0, 0, False


CONTINUE: Action = (ActionKind.CONTINUE, None, 0, 0, False)
"""The action that computes the uncomputed tokens of every running request not yet granted or held.

Decoding requests come first, also in the plan, then prefills, each in the order of admission. If
there are not enough free blocks, victims are preempted. One `CONTINUE` is cheaper than one `Run`
per request.
"""


class Denied(StrEnum):
    """Why an action was not granted."""

    BUDGET = "budget"
    SEATS = "seats"
    BLOCKS = "blocks"
    NOT_READY = "not ready"
    """The request was preempted in this step; or the blocks freed for it are still used by a step
    in flight, and it may be admitted in the next step; or it waits for a gate, a resume or a
    KV-cache load and is not in `SchedulerView.waiting`."""
    ENCODER = "encoder"
    PRESSURE = "pressure"
    """A request was preempted for lack of blocks in this step, so no request is admitted."""
    NOTHING = "nothing to compute"
    ILLEGAL = "illegal"
    """The contract forbids the action. In strict mode the scheduler raises an error instead."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The result of an action. True if it was granted.

    num_tokens: tokens granted in this step; for CONTINUE the sum over all requests. 0 for Evict and
        Hold, and for an admission that is delayed because its blocks are being loaded or because
        another request computes them in this step.
    num_cached: tokens found in the prefix cache at an admission. Both numbers are 0 if the
        admission is delayed; the request is then still waiting.
    denied: reason of the denial, or None.
    """

    num_tokens: int = 0
    num_cached: int = 0
    denied: Denied | None = None

    def __bool__(self) -> bool:
        return self.denied is None


class Policy:
    """Decides which request is served first and which is preempted.

    static_rank: True promises that `rank` of a waiting request depends only on that request and
        does not change while it waits. The scheduler then keeps a heap. False: `rank` is called in
        every step.
    preempts: True: the default `plan` admits with `PreemptAndAdmit`, so that a waiting request
        preempts running ones of worse rank when no batch slot is free or there are not enough free
        blocks.
        False: it admits with `Run`.
    work_conserving: False for a policy that deliberately leaves capacity unused, such as static
        batching. The scheduler then does not warn about idle steps.
    """

    CONTRACT: ClassVar[str] = "policy"
    CONTRACT_VERSION: ClassVar[str] = "0.3"
    static_rank: ClassVar[bool] = True
    preempts: ClassVar[bool] = False
    work_conserving: ClassVar[bool] = True

    def __init__(self) -> None:
        """Create the policy of one scheduler.

        If the plugin has an options model, this method must accept the keyword `options=None`: the
        validated options as a mapping.
        """

    def rank(self, request: RequestView, view: SchedulerView) -> Any:
        """Return a sortable key: the lowest is admitted first. Ties are broken by arrival.

        A key that is NaN, or a tuple with NaN, is a fault of the policy.
        """
        return request.sequence

    def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
        """Yield the actions of one step and receive a `Grant` for each.

        The default continues all running requests, then admits by rank until one is denied. If it
        is not overridden, an inlined loop makes the same plans. Use `yield from` to wrap the
        generator of another policy.
        """
        yield CONTINUE
        admit = PreemptAndAdmit if self.preempts else Run
        for request in view.waiting:
            if not (yield admit(request)):
                return

    def victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        """Return the request of `running` to preempt when blocks run out.

        running: not empty, in the order of admission. Default: the last admitted.
        """
        return running[-1]

    def on_arrival(self, request: RequestView, view: SchedulerView) -> None:
        """Handle the arrival of a request."""

    def on_granted(self, request: RequestView, num_tokens: int, view: SchedulerView) -> None:
        """Handle a grant: the step computes `num_tokens` of a request."""

    def on_output(self, request: RequestView, num_tokens: int, view: SchedulerView) -> None:
        """Handle an output: `num_tokens` new tokens of a request."""

    def on_evict(self, request: RequestView, num_tokens_lost: int, view: SchedulerView) -> None:
        """Handle a preemption: `num_tokens_lost` computed tokens of a request are lost."""

    def on_finish(self, request: RequestView, view: SchedulerView) -> None:
        """Handle a request that has ended, for any reason."""


if not TYPE_CHECKING:  # a type checker reports an unknown name itself
    __getattr__ = reject_retired(__name__)
