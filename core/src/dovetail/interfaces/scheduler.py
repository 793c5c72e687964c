"""The contract of a scheduler: which requests run next, and what their results mean.

To change only the order of requests, write a policy (`dovetail.interfaces.policy`). Implement this
contract to replace the mechanism. A scheduler is single-threaded, does no I/O, reads only the clock
of its context and imports no tensor library. So the same class runs in an engine, in a test and in
a simulator. Only the scheduler writes to the requests that were added to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from dovetail.clock import Clock
from dovetail.interfaces.admission import AdmissionGate
from dovetail.interfaces.kv_cache import KVCacheConfig
from dovetail.interfaces.kv_connector import KVSchedulerSide
from dovetail.plan import SchedulerOutput
from dovetail.request import EngineCoreRequest, FinishReason
from dovetail.result import LogprobColumns, ModelRunnerOutput, PooledTensor

if TYPE_CHECKING:
    from dovetail.interfaces.policy import Policy


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """The limits of a step and of the scheduler.

    max_num_seqs: maximum number of requests that hold a batch slot.
    max_num_batched_tokens: maximum number of tokens per step.
    max_model_len: maximum number of tokens per request, prompt and output together.
    enable_chunked_prefill: whether a prompt may be split over several steps.
    long_prefill_token_threshold: maximum chunk of a prompt per step; 0 for no limit.
    enable_prefix_caching: whether full blocks are kept for reuse by later requests.
    num_lookahead_tokens: maximum number of drafts per request. A request holds blocks for this many
        tokens beyond the last computed token, up to its maximum length. 0 disables drafts.
    max_num_encoder_tokens: placeholder tokens whose content is encoded in one step.
    encoder_cache_tokens: placeholder tokens whose encoder output is cached.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    num_lookahead_tokens: int = 0
    max_num_encoder_tokens: int = 0
    encoder_cache_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class SchedulerContext:
    """Constructor arguments of a scheduler.

    options: validated options of the scheduler plugin.
    policy_options: validated options of `policy`. If not empty, they are passed to its constructor
        as the keyword `options`.
    strict: whether exceptions of the policy are raised (in tests and the conformance kit).
    Otherwise they are contained and counted (in production).
    gates: admission gates for new requests. Only for schedulers that provide "gates". The scheduler
        shuts them down.
    kv_connector: the scheduler side of a KV connector, or None. Only for schedulers that provide
        "kv_connector". The scheduler shuts it down.
    kv_transfer_timeout_s: seconds after which an unfinished load counts as failed. After twice this
        time, no transfer may use its blocks, and they are freed.
    admission_timeout_s: seconds after which a request that a gate still holds ends with an error.
    """

    limits: SchedulerLimits
    kv_cache: KVCacheConfig
    clock: Clock
    policy: type[Policy] | None = None
    seed: int = 0
    options: Mapping[str, object] = field(default_factory=dict)
    policy_options: Mapping[str, object] = field(default_factory=dict)
    strict: bool = False
    gates: Sequence[AdmissionGate] = ()
    kv_connector: KVSchedulerSide | None = None
    kv_transfer_timeout_s: float = 30.0
    admission_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """Counts of waiting and running requests.

    num_paused: waiting and running requests that a pause keeps from running.
    num_transfers: unfinished transfers of the KV connector, and blocks that will be freed by the
        next steps. While it is not 0, plans must be executed, even empty ones.
    """

    num_waiting: int
    num_running: int
    num_paused: int = 0
    num_transfers: int = 0

    @property
    def num_active(self) -> int:
        """Requests that are not paused, including those that wait for a gate or a transfer."""
        return self.num_waiting + self.num_running - self.num_paused


class PauseScope(StrEnum):
    """Which requests a pause stops.

    NEW: requests that have never been admitted. Admitted requests, including preempted ones, run to
    completion.
    ALL: all requests. They keep their batch slots, blocks and position in the queue.
    """

    NEW = "new"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Counts after one step. Those marked (total) accumulate since the scheduler was created.

    kv_cache_usage: fraction of the blocks in use, 0 to 1. num_blocks, num_used_blocks,
    num_cached_blocks: numbers of all KV blocks, of blocks in use, and of blocks in the prefix
    cache, used or not. prefix_queries, prefix_hits (total): tokens looked up in the prefix cache,
    and tokens found. num_preemptions (total): preempted requests. num_recomputed_tokens (total):
    tokens recomputed after a preemption, except tokens that the prefix cache saves. Counted
    when the request is admitted again. num_evictions (total): cached blocks that were reused for
    other tokens. num_aborted (total): requests that were aborted.
    schedule_ns, update_ns: duration of planning this step and of processing its result.
    policy: name of the active policy class; after a failure of the requested policy it is another
    class. num_illegal_actions (total): actions that were denied because the policy contract forbids
    them. policy_failures (total): exceptions raised by the policy. FCFS replaces it after the
    first. num_idle_steps (total): steps in which the policy ran nothing although something could
    run. num_drafts, num_accepted (total): verified and accepted draft tokens.
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
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    num_evictions: int = 0
    num_aborted: int = 0
    schedule_ns: int = 0
    update_ns: int = 0
    policy: str = ""
    num_illegal_actions: int = 0
    policy_failures: int = 0
    num_idle_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0

    @property
    def prefix_hit_rate(self) -> float:
        """Fraction of the tokens looked up in the prefix cache that were found, or 0 for none."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A request that ended in this step.

    stop_reason: the id of the stop token if it is in the user's `stop_token_ids`, else None.
    """

    request_id: str
    reason: FinishReason
    stop_reason: int | str | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreOutputs:
    """The outputs of one step, as columns.

    request_ids, num_new_tokens: one entry per request with new tokens.
    token_ids: int32; the new tokens of these requests, concatenated.
    finished: requests that ended, with or without new tokens.
    logprobs, prompt_logprobs: by request id, for requests with these parameters.
    num_cached_tokens: number of prompt tokens found in the cache, by request id, sent once with the
    first tokens. admitted_ns: the engine's clock when these requests were admitted.
    pooled: results of requests with `pooling_params`, by request id. These requests are in
    `finished` with the reason STOP.
    """

    request_ids: list[str] = field(default_factory=list)
    num_new_tokens: array[int] = field(default_factory=lambda: array("i"))
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    finished: tuple[Finished, ...] = ()
    logprobs: Mapping[str, LogprobColumns] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, LogprobColumns] = field(default_factory=dict)
    num_cached_tokens: Mapping[str, int] = field(default_factory=dict)
    admitted_ns: Mapping[str, int] = field(default_factory=dict)
    stats: SchedulerStats | None = None
    pooled: Mapping[str, PooledTensor] = field(default_factory=dict)


class SchedulerInterface(ABC):
    """Decides which requests run in each step.

    Contract: Plans are executed in the order in which they were made, and `update_from_output` is
    called once for each, in that order. Up to four plans may be in flight. Every added request ends
    in exactly one `Finished`, except an aborted one: `abort_requests` returns its id. No plan
    exceeds `SchedulerLimits`. If any request can run, the plan of `schedule` is not empty.

    Drafts. The drafts that a worker reports (`ModelRunnerOutput.num_drafts`) may be verified by the
    next plan that contains the request. While a plan that samples for the request is in flight,
    the number of accepted drafts is unknown. Then the next plan starts as if all were accepted, and
    allows for `num_lookahead_tokens` new drafts. The worker starts earlier by the number of
    rejected drafts (`WorkerBase`, "Drafts"). `num_sampled` gives the number of tokens that the
    request gained.

    Errors. A request with an entry in `ModelRunnerOutput.errors` has failed. It ends with an error
    and the message of that entry, and its sampled tokens are ignored. Other requests are not
    affected.

    Pooling. A request with `pooling_params` runs like one with a single output token, but its
    prompt may have `max_model_len` tokens. It ends with the step whose result has its
    `ModelRunnerOutput.pooled`, which the scheduler forwards.

    Gates. A request is scheduled when all of its admission gates (`dovetail.interfaces.admission`)
    have let it pass. A held request does not delay others. If a gate fails a request, it ends with
    an error.
    provides: ids of the implemented optional parts: "gates", "encoder" (encoded content within the
    encoder limits), "kv_connector".
    """

    CONTRACT: ClassVar[str] = "scheduler"
    CONTRACT_VERSION: ClassVar[str] = "0.7"
    provides: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def __init__(self, context: SchedulerContext) -> None:
        """Create a scheduler without requests."""

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Add a request. Raise RequestError if it can never run or its id is in use."""

    @abstractmethod
    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """Abort requests in any state and return their ids. Unknown ids are ignored."""

    @abstractmethod
    def schedule(self) -> SchedulerOutput:
        """Plan the next step. The plan is empty if nothing can run."""

    @abstractmethod
    def update_from_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Process the result of the oldest plan in flight and return the requests' outputs."""

    @abstractmethod
    def depth(self) -> Depth:
        """Return the counts of requests. If `num_active` is 0, no step is needed."""

    @abstractmethod
    def pause(self, scope: PauseScope) -> None:
        """Stop requests from running until `resume`. A second call replaces the scope.

        Requests may still be added and aborted, and plans in flight are completed.
        """

    @abstractmethod
    def resume(self) -> None:
        """End a pause. Do nothing if the scheduler is not paused."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. If blocks are in use, change nothing and return False."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release all resources. Only `shutdown` may be called afterwards."""
