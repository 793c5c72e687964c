"""A request inside the engine: its tokens, how far they are computed, and where it stands.

One object per request, mutable, slotted, owned by the scheduler that it was added to: nobody else
writes to it. Policies see it as a read-only `RequestView` (`dovetail.interfaces.policy`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from dovetail.sampling_params import SamplingParams


class RequestStatus(IntEnum):
    """Where a request stands. Everything from FINISHED_STOPPED on is final."""

    WAITING = 0
    WAITING_FOR_FSM = 1
    WAITING_FOR_REMOTE_KVS = 2
    RUNNING = 3
    PREEMPTED = 4
    FINISHED_STOPPED = 5
    FINISHED_LENGTH_CAPPED = 6
    FINISHED_ABORTED = 7
    FINISHED_ERROR = 8

    @property
    def finished(self) -> bool:
        """Whether nothing more will happen to the request."""
        return self >= RequestStatus.FINISHED_STOPPED


class FinishReason(StrEnum):
    """Why a completion ended, in the words of the OpenAI interface."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreRequest:
    """One request as a front end hands it to the engine core. Immutable; crosses the wire.

    prompt_token_ids: int32 ids, at least one. max_tokens: resolved, ≥ 1.
    stop_token_ids: tokens that end it, EOS among them unless it is ignored.
    bad_words_token_ids: token sequences that may not be completed.
    seed: 64 bit; always set, so that the tokens do not depend on the batch mates.
    priority: lower is served first, by schedulers that look at it.
    cache_salt: requests share cached prefixes only with those of the same salt.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    priority: int = 0
    arrival_ns: int = 0
    cache_salt: str = ""


class Request:
    """A request in a scheduler's hands.

    token_ids: int32; the prompt, then the generated tokens.
    num_computed_tokens: tokens whose keys and values are in the cache, or will be once the plans
        handed out so far are executed.
    num_tokens_with_pending: `len(token_ids)` plus tokens that a plan in flight will sample.
    max_total_tokens: the length at which it is finished, prompt included.
    row: the worker's row while it runs, -1 otherwise.
    num_cached_tokens: prompt tokens found in the prefix cache at its first admission, or -1.
    num_prompt_logprobs: prompt positions whose log-probabilities have been handed out.
    blocks, capacity, block_hashes, num_committed_blocks: the KV cache manager's; one list of block
        ids a group, and the tokens that they hold.
    """

    __slots__ = (
        "arrival_ns",
        "bad_words_token_ids",
        "block_hashes",
        "blocks",
        "cache_salt",
        "capacity",
        "generation",
        "max_total_tokens",
        "num_cached_tokens",
        "num_committed_blocks",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_tokens_with_pending",
        "priority",
        "request_id",
        "row",
        "sampling_params",
        "seed",
        "sequence",
        "status",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(self, asked: EngineCoreRequest, *, max_model_len: int, sequence: int = 0) -> None:
        self.request_id = asked.request_id
        self.sampling_params = asked.sampling_params
        self.token_ids = array("i", asked.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_total_tokens = min(self.num_prompt_tokens + asked.max_tokens, max_model_len)
        self.stop_token_ids = asked.stop_token_ids
        self.bad_words_token_ids = asked.bad_words_token_ids
        self.seed = asked.seed
        self.priority = asked.priority
        self.arrival_ns = asked.arrival_ns
        self.cache_salt = asked.cache_salt
        self.sequence = sequence
        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.num_computed_tokens = 0
        self.num_tokens_with_pending = self.num_prompt_tokens
        self.num_cached_tokens = -1
        self.num_preemptions = 0
        self.row = -1
        self.generation = 0
        self.num_prompt_logprobs = 0
        self.blocks: list[list[int]] = []
        self.capacity = 0
        self.block_hashes: list[bytes] = []
        self.num_committed_blocks = 0

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )
