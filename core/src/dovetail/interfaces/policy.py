"""The contract of a scheduling policy: it actions, the scheduler grants.

A policy orders requests, picks victims and, if it wants, plans whole steps. It never touches rows,
blocks, budgets or plans: those are the scheduler's (`dovetail.scheduling.Scheduler`). Everything
here has a default, so the smallest policy is one method. Pure Python, no clock of its own, no
randomness but `SchedulerView.rng`.

Three levels. `rank` alone orders admission: the scheduler then runs an inlined loop. `plan` is a
generator for full control of a step: it yields actions and is sent a `Grant` for each. `victim`
picks who gives way when blocks run out. The `on_…` hooks are for accounts.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dovetail.retired_names import refuse_retired
from dovetail.sampling_params import SamplingParams


class RequestView(Protocol):
    """A request as a policy sees it: to read, never to write."""

    @property
    def request_id(self) -> str:
        """The user's name of it."""

    @property
    def sequence(self) -> int:
        """Its place in the order of arrival; unique, the earlier the lower."""

    @property
    def priority(self) -> int:
        """The user's priority; lower is served first."""

    @property
    def tenant(self) -> str:
        """On whose account it runs; empty where nobody said."""

    @property
    def arrival_ns(self) -> int:
        """When it arrived, in nanoseconds of the engine's clock."""

    @property
    def deadline_ns(self) -> int:
        """When its first token is due, in nanoseconds of the engine's clock; 0 for never."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of its prompt."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far; how many there will be is not known."""

    @property
    def max_total_tokens(self) -> int:
        """The length, prompt included, at which it ends at the latest."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are in the cache."""

    @property
    def num_preemptions(self) -> int:
        """How often it has lost its blocks."""

    @property
    def cache_salt(self) -> str:
        """The salt of its cached prefixes: whom it shares them with."""

    @property
    def sampling_params(self) -> SamplingParams:
        """What the user asked of its tokens."""


class SchedulerView(Protocol):
    """A scheduler as its policy sees it: read-only, and up to date within a step."""

    @property
    def now_ns(self) -> int:
        """The time of this step, in nanoseconds of the engine's clock."""

    @property
    def step_id(self) -> int:
        """The number of the step that is being planned."""

    @property
    def rng(self) -> Random:
        """Random numbers of this policy's own, seeded by the engine."""

    @property
    def running(self) -> Sequence[RequestView]:
        """Requests that hold a row, in the order of their admission."""

    @property
    def waiting(self) -> Sequence[RequestView]:
        """Requests without a row that could be admitted now, in the order of `rank`.

        Those that wait for a grammar or for remote keys and values are not among them.
        """

    @property
    def num_waiting(self) -> int:
        """Requests without a row, ready or not."""

    @property
    def tokens_left(self) -> int:
        """Tokens of this step's budget that are not granted yet."""

    @property
    def seats_left(self) -> int:
        """Rows that could be handed out now."""

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that could be handed out now."""

    @property
    def block_size(self) -> int:
        """Tokens a block."""

    def num_cached_tokens(self, request: RequestView) -> int:
        """Return how many of its tokens the prefix cache holds; changes nothing."""

    def num_uncomputed_tokens(self, request: RequestView) -> int:
        """Return the tokens known or on their way that are still to be computed.

        1 for a request that decodes; 0 for one whose last token is on its way. For a waiting one
        what the prefix cache holds is not counted.
        """


class ActionKind(IntEnum):
    """What an action asks for: its first field."""

    RUN = 0
    PREEMPT_AND_ADMIT = 1
    EVICT = 2
    HOLD = 3
    CONTINUE = 4


Action = tuple[ActionKind, RequestView | None, int, int, bool]
"""(kind, request, max_tokens, reserve, whole). Plain tuples: an object an action costs a step more
than twice as much. Make them with `Run`, `PreemptAndAdmit`, `Evict`, `Hold` and `CONTINUE`."""


def Run(  # noqa: N802  # reads as the wish that it makes
    request: RequestView, max_tokens: int = 0, *, reserve: int = 0, whole: bool = False
) -> Action:
    """Ask that a running or waiting request computes tokens in this step.

    max_tokens: at most so many of its uncomputed tokens; 0 for as many as there are.
    reserve: total tokens, prompt included, to hold blocks for from now on; 0 for what is computed.
    whole: all of them or nothing.
    """
    return ActionKind.RUN, request, max_tokens, reserve, whole


def PreemptAndAdmit(request: RequestView, max_tokens: int = 0) -> Action:  # noqa: N802
    """Ask to admit a waiting request at the cost of running ones of a worse rank.

    The scheduler takes victims by `Policy.victim` until it fits. It is all or nothing: if the
    request would not fit even so, nobody is evicted.
    """
    return ActionKind.PREEMPT_AND_ADMIT, request, max_tokens, 0, False


def Evict(request: RequestView) -> Action:  # noqa: N802
    """Ask that a running request loses its row and blocks and waits again.

    What it was granted in this step is taken back.
    """
    return ActionKind.EVICT, request, 0, 0, False


def Hold(request: RequestView) -> Action:  # noqa: N802
    """Ask that a running request keeps row and blocks and computes nothing in this step."""
    return ActionKind.HOLD, request, 0, 0, False


CONTINUE: Action = (ActionKind.CONTINUE, None, 0, 0, False)
"""Ask that every running request not yet granted or held computes what it has left: first those
that decode, then the others, each in the order of admission. Those that decode come first in the
plan, too. Victims give way where blocks are short. The cheapest action: one for all."""


class Denied(StrEnum):
    """Why an action was not granted."""

    BUDGET = "budget"
    SEATS = "seats"
    BLOCKS = "blocks"
    NOT_READY = "not ready"
    """It has lost its row in this step; or room was made for it that is free only when the step
    that is out has been executed: it may be admitted in the next step. Or it waits for a gate, for
    the end of a pause or for blocks that are loaded, and is not among those that wait in a view."""
    ENCODER = "encoder"
    PRESSURE = "pressure"
    """The step has preempted someone for lack of blocks; such a step admits nobody."""
    NOTHING = "nothing to compute"
    ILLEGAL = "illegal"
    """In strict mode it raises instead."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What became of an action; true if it was granted.

    num_tokens: granted in this step (all requests' together for CONTINUE; 0 for Evict and Hold, and
        for an admission that waits for blocks: they are loaded, or another request computes them in
        this step, and `request` is passed over until the next).
    num_cached: tokens that the prefix cache saved at an admission. An admission has tokens of
        either kind; a request that is passed over has none, and is still to be admitted.
    denied: None if granted.
    """

    num_tokens: int = 0
    num_cached: int = 0
    denied: Denied | None = None

    def __bool__(self) -> bool:
        return self.denied is None


class Policy:
    """Who is served first, and who gives way.

    static_rank: True promises that `rank` of a waiting request depends on that request alone and
        never changes while it waits; the scheduler then keeps a heap. False: asked at every step.
    preempts: True makes the default `plan` admit by `PreemptAndAdmit`: a waiting request preempts
        running ones of a worse rank when seats or blocks are short. False: by `Run`.
    work_conserving: False for a policy that leaves room unused on purpose (static batching, say);
        the scheduler's watchdog then keeps quiet.
    """

    CONTRACT: ClassVar[str] = "policy"
    CONTRACT_VERSION: ClassVar[str] = "0.3"
    static_rank: ClassVar[bool] = True
    preempts: ClassVar[bool] = False
    work_conserving: ClassVar[bool] = True

    def __init__(self) -> None:
        """Make it, without arguments; once for each scheduler.

        A plugin with an options model takes the keyword `options=None`: a mapping, validated.
        """

    def rank(self, request: RequestView, view: SchedulerView) -> Any:
        """Return a sortable key: the lowest is admitted first. Ties go by arrival."""
        return request.sequence

    def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
        """Yield the actions of one step; each is answered by a `Grant` at once.

        Default: continue all that run, then admit by rank until one is denied. A policy that does
        not override it gets the same plans from an inlined loop. Wrap another policy's generator
        with `yield from` to compose.
        """
        yield CONTINUE
        admit = PreemptAndAdmit if self.preempts else Run
        for request in view.waiting:
            if not (yield admit(request)):
                return

    def victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        """Return which of `running` gives way when blocks run out.

        `running` is in order of admission and not empty. Default: the last admitted.
        """
        return running[-1]

    def on_arrival(self, request: RequestView, view: SchedulerView) -> None:
        """Hear of a new request."""

    def on_granted(self, request: RequestView, num_tokens: int, view: SchedulerView) -> None:
        """Hear that a step brings `num_tokens` of a request forward."""

    def on_output(self, request: RequestView, num_tokens: int, view: SchedulerView) -> None:
        """Hear that a request got `num_tokens` new tokens."""

    def on_evict(self, request: RequestView, num_tokens_lost: int, view: SchedulerView) -> None:
        """Hear that a request lost its row and the work on `num_tokens_lost` tokens."""

    def on_finish(self, request: RequestView, view: SchedulerView) -> None:
        """Hear that a request is finished, whatever the reason."""


if not TYPE_CHECKING:  # a type checker reports an unknown name itself
    __getattr__ = refuse_retired(__name__)
