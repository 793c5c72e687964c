"""The contract of a scheduling policy: it wishes, the scheduler grants.

A policy orders requests and picks victims. It never touches rows, blocks, budgets or plans: those
are the scheduler's (`dovetail.scheduling.Scheduler`). Everything here has a default, so the
smallest policy is one method. Pure Python, no clock of its own, no randomness but what is injected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

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
    def arrival_ns(self) -> int:
        """When it arrived, in nanoseconds of the engine's clock."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of its prompt."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far; how many there will be is nobody's to know."""

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
    """A scheduler as its policy sees it: read-only."""

    @property
    def now_ns(self) -> int:
        """The time of this step, in nanoseconds of the engine's clock."""

    @property
    def running(self) -> Sequence[RequestView]:
        """Requests that hold a row, in the order of their admission."""

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that could be handed out now."""

    def num_cached_tokens(self, request: RequestView) -> int:
        """Return how many of its tokens the prefix cache holds; changes nothing."""


class Policy:
    """Who is served first, and who gives way.

    static_rank: True promises that `rank` of a waiting request depends on that request alone and
        never changes; the scheduler then keeps a heap. False: it is asked at every step.
    preempts: True lets a waiting request displace a running one of a worse rank when seats or
        blocks are short. False: only a running request that needs a block takes one away.
    """

    CONTRACT: ClassVar[str] = "policy"
    CONTRACT_VERSION: ClassVar[str] = "0.1"
    static_rank: ClassVar[bool] = True
    preempts: ClassVar[bool] = False

    def __init__(self) -> None:
        """Make it, without arguments; once for each scheduler.

        A plugin with an options model takes the keyword `options=None`: a mapping, validated.
        """

    def rank(self, request: RequestView, view: SchedulerView) -> Any:
        """Return a sortable key: the lowest is admitted first. Ties go by arrival."""
        return request.sequence

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
