"""The contract of a scheduler: which requests run next, and what their results mean.

Most research needs a policy only (`dovetail.interfaces.policy`); this contract is for replacing
the mechanism. A scheduler is single-threaded, does no input or output, reads no clock but the one
it is given and imports no tensor library, so that the same object runs in an engine, in a test and
in a simulator. It alone writes to the requests that were added to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from dovetail.clock import Clock
from dovetail.interfaces.kv_cache import KVCacheConfig
from dovetail.plan import SchedulerOutput
from dovetail.request import EngineCoreRequest, FinishReason
from dovetail.result import LogprobColumns, ModelRunnerOutput

if TYPE_CHECKING:
    from dovetail.interfaces.policy import Policy


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """What a step and a scheduler may hold.

    max_num_seqs: requests that hold a row. max_num_batched_tokens: tokens a step.
    max_model_len: tokens a request, prompt and output together.
    enable_chunked_prefill: whether a prompt may be brought forward in pieces.
    long_prefill_token_threshold: longest piece of a prompt a step; 0 for no limit.
    enable_prefix_caching: whether full blocks are kept and found again.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True


@dataclass(frozen=True, kw_only=True)
class SchedulerContext:
    """All that a scheduler is made from.

    options: the scheduler plugin's own, validated; policy_options: those of `policy`, which takes
    them as its constructor's keyword `options`, if there are any.
    """

    limits: SchedulerLimits
    kv_cache: KVCacheConfig
    clock: Clock
    policy: type[Policy] | None = None
    seed: int = 0
    options: Mapping[str, object] = field(default_factory=dict)
    policy_options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """How many requests stand where."""

    num_waiting: int
    num_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Counts after one step; those marked (sum) grow over the scheduler's life.

    kv_cache_usage: share of blocks in use, 0 to 1.
    prefix_queries, prefix_hits (sum): tokens looked up in the prefix cache, and found.
    num_preemptions, num_recomputed_tokens (sum): evictions, and tokens computed in vain by them.
    """

    step_id: int
    num_waiting: int
    num_running: int
    num_scheduled_tokens: int
    kv_cache_usage: float
    prefix_queries: int
    prefix_hits: int
    num_preemptions: int
    num_recomputed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A request that ended with this step.

    stop_reason: the stop token's id where it was one of the user's, else None.
    """

    request_id: str
    reason: FinishReason
    stop_reason: int | str | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreOutputs:
    """What one step gave to the requests' owners, as columns.

    request_ids, num_new_tokens: one entry a request that got tokens, and how many.
    token_ids: int32; the new tokens of all of them, one after the other.
    finished: requests that ended, whether or not they got tokens.
    logprobs, prompt_logprobs: by request id, for those that asked.
    num_cached_tokens: by request id, once, at the first tokens: prompt tokens found in the cache.
    """

    request_ids: list[str] = field(default_factory=list)
    num_new_tokens: array[int] = field(default_factory=lambda: array("i"))
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    finished: tuple[Finished, ...] = ()
    logprobs: Mapping[str, LogprobColumns] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, LogprobColumns] = field(default_factory=dict)
    num_cached_tokens: Mapping[str, int] = field(default_factory=dict)
    stats: SchedulerStats | None = None


class SchedulerInterface(ABC):
    """Decides what runs next.

    Law. Plans are executed in the order in which they were made, and `update_from_output` is called
    once for each, in that order; up to two plans may be out at a time. A request is never lost:
    every added request ends in exactly one `Finished`, unless it was aborted by the caller, who is
    told by the return value. No plan exceeds the limits it was made with. While something can run,
    `schedule` lets something run.
    """

    CONTRACT: ClassVar[str] = "scheduler"
    CONTRACT_VERSION: ClassVar[str] = "0.1"

    @abstractmethod
    def __init__(self, context: SchedulerContext) -> None:
        """Make an idle scheduler; keep what is needed of `context`."""

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Take a request in. Raise RequestError if it can never run or its id is in use."""

    @abstractmethod
    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """End requests at once, in any state; return the ids that were alive. Unknown: ignored."""

    @abstractmethod
    def schedule(self) -> SchedulerOutput:
        """Plan the next step. The plan is empty if nothing can run."""

    @abstractmethod
    def update_from_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Take in the result of the oldest plan that is out; return what it gave to whom."""

    @abstractmethod
    def depth(self) -> Depth:
        """Return how many requests wait and run. Both 0: there is nothing left to do."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; return False, changing nothing, if blocks are in use."""

    @abstractmethod
    def shutdown(self) -> None:
        """Let go of everything; nothing is called after it. May be called twice."""
