"""The contract of a scheduler: which requests run next, and what their results mean.

Most research needs a policy only (`dovetail.interfaces.policy`); this contract is for replacing
the mechanism. A scheduler is single-threaded, does no input or output, reads no clock but the one
it is given and imports no tensor library, so that the same object runs in an engine, in a test and
in a simulator. It alone writes to the requests that were added to it.
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
    num_lookahead_tokens: most tokens that a worker drafts for a row; a row that runs up to a
        position holds blocks for so many tokens beyond it, as far as its request may grow. 0: none.
    max_num_encoder_tokens: placeholder tokens whose content is encoded in one step.
    encoder_cache_tokens: placeholder tokens whose encoder output is kept at a time.
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
    """All that a scheduler is made from.

    options: the scheduler plugin's own, validated; policy_options: those of `policy`, which takes
    them as its constructor's keyword `options`, if there are any. strict: whether a mistake of the
    policy raises (tests, the conformance kit) or is contained and counted (production).
    gates: what new requests may have to wait for; only for schedulers that provide "gates". The
        scheduler shuts them down.
    kv_connector: where blocks of the KV cache may be had from, and stored; None for nowhere. Only
        for schedulers that provide "kv_connector". The scheduler shuts it down.
    kv_transfer_timeout_s: seconds after which a load that has not ended counts as failed. After
        twice the time no transfer touches its blocks, which come free then.
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
    """How many requests stand where.

    num_paused: of both, whom a pause keeps from running. num_transfers: of the KV connector, under
    way, and of blocks that come free with the next steps; while there are any, plans must go out,
    empty ones too.
    """

    num_waiting: int
    num_running: int
    num_paused: int = 0
    num_transfers: int = 0

    @property
    def num_active(self) -> int:
        """How many a step could bring forward, now or when what they wait for is there."""
        return self.num_waiting + self.num_running - self.num_paused


class PauseScope(StrEnum):
    """How far a pause goes.

    NEW: requests that were admitted go on to their end, preempted ones too; nobody else begins.
    ALL: nothing runs, and everything keeps its place.
    """

    NEW = "new"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Counts after one step; those marked (sum) grow over the scheduler's life.

    kv_cache_usage: share of blocks in use, 0 to 1. num_blocks, num_used_blocks, num_cached_blocks:
    KV blocks there are, those in use, and those, used or not, that can be found as a prefix.
    prefix_queries, prefix_hits (sum): tokens looked up in the prefix cache, and found.
    num_preemptions, num_recomputed_tokens (sum): evictions, and tokens that have to be computed
    again because of them, counted when their request comes back: the prefix cache saves some.
    num_evictions (sum): cached blocks that were handed out for something else.
    num_aborted (sum): requests that were aborted.
    schedule_ns, update_ns: time that planning this step and taking its result in took.
    policy: the class that is in charge; another one than was asked for after a failure.
    num_illegal_actions (sum): actions that its contract forbids, denied.
    policy_failures (sum): exceptions out of it; the first one puts FCFS in charge.
    num_idle_steps (sum): steps in which it let nothing run though something could.
    num_drafts, num_accepted (sum): draft tokens that were verified, and those that were right.
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
        """Share of the tokens looked up in the prefix cache that were found; 0 if none was."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0


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

    Contract. Plans are executed in the order in which they were made, and `update_from_output` is
    called once for each, in that order; up to four plans may be out at a time. A request is never
    lost: every added request ends in exactly one `Finished`, unless it was aborted by the caller,
    who is told by the return value. No plan exceeds the limits it was made with. While something
    can run, `schedule` lets something run.

    Drafts. What a worker says that it has drafted (`ModelRunnerOutput.num_drafts`) may be verified
    by the row's next run. Where a run of the row that samples is in flight, nobody knows yet what
    it leaves behind: then the next run begins after all of its drafts, and allows for
    `num_lookahead_tokens` drafts of its own. The worker begins as much earlier as drafts were
    wrong (`WorkerBase`, "Drafts"); `num_sampled` tells how far the row has come.

    Errors. A run that `ModelRunnerOutput.errors` names has failed: its request ends with an error
    and that message, and nothing that the run sampled counts. The other runs are not affected.

    Gates. A request that a gate holds (`dovetail.interfaces.admission`) is scheduled when all its
    gates have let it pass, and holds nobody up; whom a gate fails ends with an error.
    provides: ids of the optional parts that the class does: "gates", "encoder" (content that is
    encoded, within its limits), "kv_connector".
    """

    CONTRACT: ClassVar[str] = "scheduler"
    CONTRACT_VERSION: ClassVar[str] = "0.4"
    provides: ClassVar[frozenset[str]] = frozenset()

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
        """Return how many requests wait and run. None active: there is nothing to do now."""

    @abstractmethod
    def pause(self, scope: PauseScope) -> None:
        """Keep requests from running until `resume`; another pause's scope takes its place.

        Requests may be added and aborted meanwhile, and plans that are out are settled as ever.
        """

    @abstractmethod
    def resume(self) -> None:
        """Lift a pause; do nothing if there is none."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; return False, changing nothing, if blocks are in use."""

    @abstractmethod
    def shutdown(self) -> None:
        """Let go of everything; nothing is called after it. May be called twice."""
