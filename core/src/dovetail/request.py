"""A request in the engine core: its tokens, their computation, and its status.

The object is mutable and slotted. The scheduler owns it; no other code writes to it. Policies get
it as a read-only `RequestView` (`dovetail.interfaces.policy`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

from dovetail.pooling_params import TOKEN_EMBED, PoolingParams
from dovetail.retired_names import reject_retired
from dovetail.sampling_params import SamplingParams


class RequestStatus(IntEnum):
    """The status of a request. FINISHED_STOPPED and all greater values are final."""

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
        """Whether the status is final."""
        return self >= RequestStatus.FINISHED_STOPPED


class FinishReason(StrEnum):
    """Why a completion has ended, with the values of the OpenAI API."""

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
class EncoderInput:
    """Multimodal content whose encoder output replaces some prompt tokens.

    position, num_tokens: the placeholder tokens [position, position + num_tokens) of the prompt.
    content_hash: not empty; equal hashes mean equal encoder outputs.
    """

    position: int
    num_tokens: int
    content_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreRequest:
    """A request as the front end sends it to the engine core. Immutable and serializable.

    prompt_token_ids: int32 ids, at least one. max_tokens: at least 1; the model's length allows it.
    stop_token_ids: tokens that end it, including EOS unless `ignore_eos` is set.
    bad_words_token_ids: token sequences that must not be generated.
    seed: 64 bits; always set, so that the tokens do not depend on the rest of the batch.
    priority: lower is served first, by policies that use it.
    cache_salt: requests share cached prefixes only with requests of the same salt.
    tenant: the tenant, for policies that are fair to tenants; "" for none.
    deadline_ns: deadline of the first token on the engine's clock, for policies that use it; 0 for
        none.
    lora_id: id of the request's LoRA adapter; "" for none.
    encoder_inputs: multimodal content, by position; placeholders do not overlap.
    pooling_params: if not None, the request has one pooled result and no output tokens. Then
        `max_tokens` is 1, and the prompt may have the maximum length.
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
    tenant: str = ""
    deadline_ns: int = 0
    lora_id: str = ""
    encoder_inputs: tuple[EncoderInput, ...] = ()
    pooling_params: PoolingParams | None = None


class SharedStepCounter:
    """A counter of steps, shared by all requests of a decode batch."""

    __slots__ = ("num_steps",)

    def __init__(self) -> None:
        self.num_steps = 0


STATIC_COUNTER = SharedStepCounter()
"""The step counter of requests that are not in the decode batch. It always stays 0."""


class Request:
    """The scheduler's state of a request.

    token_ids: int32; the prompt, then the generated tokens.
    num_computed_tokens: tokens whose keys and values are in the cache after all plans in flight, if
        every draft is accepted.
    num_tokens_with_pending: known tokens after all plans in flight, if every draft is accepted;
        `num_in_flight` more than `num_tokens`. When drafts are rejected, this count and
        num_computed_tokens decrease by the number of rejected drafts.
    max_drafts: maximum number of drafts of the request. num_drafts: drafts after the last
    result.
    max_total_tokens: maximum length, prompt included.
    row: batch slot of a running request, -1 otherwise.
    encoder_end: the position after its last placeholder token; 0 for none.
    num_cached_tokens: prompt tokens found in the prefix cache at its first admission, or -1.
    admitted_ns: the engine's clock at the admission before its first token; 0 before.
    num_lost_tokens: tokens computed before its last preemption; 0 while it runs.
    num_prompt_logprobs: prompt positions whose log-probabilities were returned.
    blocks, capacity, block_hashes, num_committed_blocks, num_dropped_blocks: belong to the KV cache
        manager; one list of block ids per group, and the number of tokens that they hold.
    step_counter: the shared counter of its decode batch; both token counts increase with it.
    admission, event_step: index in the order of admissions, and the value of the step counter at
        which the request needs individual processing.
    """

    __slots__ = (
        "_computed",
        "_with_pending",
        "admission",
        "admitted_ns",
        "arrival_ns",
        "bad_words_token_ids",
        "block_hashes",
        "blocks",
        "cache_salt",
        "capacity",
        "deadline_ns",
        "encoder_end",
        "encoder_inputs",
        "event_step",
        "generation",
        "lora_id",
        "max_drafts",
        "max_total_tokens",
        "num_cached_tokens",
        "num_committed_blocks",
        "num_drafts",
        "num_dropped_blocks",
        "num_lost_tokens",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "pooling_params",
        "priority",
        "request_id",
        "row",
        "sampling_params",
        "seed",
        "sequence",
        "status",
        "step_counter",
        "stop_reason",
        "stop_token_ids",
        "tenant",
        "token_ids",
    )

    def __init__(
        self,
        asked: EngineCoreRequest,
        *,
        max_model_len: int,
        sequence: int = 0,
        max_drafts: int = 0,
    ) -> None:
        self.request_id = asked.request_id
        self.sampling_params = asked.sampling_params
        self.token_ids = array("i", asked.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_total_tokens = min(self.num_prompt_tokens + asked.max_tokens, max_model_len)
        self.pooling_params = asked.pooling_params
        if asked.pooling_params is not None:
            # As with one output token, no step follows the one that computes the prompt's end.
            self.max_total_tokens = self.num_prompt_tokens + 1
        self.stop_token_ids = asked.stop_token_ids
        self.bad_words_token_ids = asked.bad_words_token_ids
        self.seed = asked.seed
        self.priority = asked.priority
        self.arrival_ns = asked.arrival_ns
        self.cache_salt = asked.cache_salt
        self.tenant = asked.tenant
        self.deadline_ns = asked.deadline_ns
        self.lora_id = asked.lora_id
        self.encoder_inputs = asked.encoder_inputs
        ends = (
            encoder_input.position + encoder_input.num_tokens
            for encoder_input in asked.encoder_inputs
        )
        self.encoder_end = max(ends, default=0)
        self.sequence = sequence
        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.step_counter = STATIC_COUNTER
        self._computed = 0
        self._with_pending = self.num_prompt_tokens
        self.max_drafts = max_drafts
        self.num_drafts = 0
        self.admission = -1
        self.event_step = -1
        self.admitted_ns = 0
        self.num_cached_tokens = -1
        self.num_preemptions = 0
        self.num_lost_tokens = 0
        self.row = -1
        self.generation = 0
        self.num_prompt_logprobs = 0
        self.blocks: list[list[int]] = []
        self.capacity = 0
        self.block_hashes: list[bytes] = []
        self.num_committed_blocks = 0
        self.num_dropped_blocks: list[int] = []

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are in the cache or are computed by plans in flight."""
        return self._computed + self.step_counter.num_steps

    @num_computed_tokens.setter
    def num_computed_tokens(self, count: int) -> None:
        self._computed = count - self.step_counter.num_steps

    @property
    def num_tokens_with_pending(self) -> int:
        """Tokens that are known or in flight."""
        return self._with_pending + self.step_counter.num_steps

    @num_tokens_with_pending.setter
    def num_tokens_with_pending(self, count: int) -> None:
        self._with_pending = count - self.step_counter.num_steps

    def use_counter(self, step_counter: SharedStepCounter) -> None:
        """Use `step_counter` from now on. The token counts do not change."""
        behind = self.step_counter.num_steps - step_counter.num_steps
        self._computed += behind
        self._with_pending += behind
        self.step_counter = step_counter

    @property
    def num_tokens(self) -> int:
        """Number of known tokens, prompt and output."""
        return len(self.token_ids)

    @property
    def num_in_flight(self) -> int:
        """Maximum number of tokens that plans in flight may add."""
        return self._with_pending + self.step_counter.num_steps - len(self.token_ids)

    @property
    def needs_all_states(self) -> bool:
        """Whether the result needs the states of all prompt tokens, also of cached ones."""
        pooling = self.pooling_params
        return self.sampling_params.prompt_logprobs is not None or (
            pooling is not None and pooling.task == TOKEN_EMBED
        )

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of known tokens, pending tokens and drafts that are not computed yet.

        The number is 0 if the last token is in flight.

        While plans are in flight, the maximum number of drafts is counted.
        """
        pending = self._with_pending + self.step_counter.num_steps
        room = self.max_total_tokens - pending
        if room <= 0:
            return 0
        uncomputed = self._with_pending - self._computed
        if not self.max_drafts:
            return uncomputed
        in_flight = pending > len(self.token_ids)
        return uncomputed + min(self.max_drafts if in_flight else self.num_drafts, room - 1)

    def take_back(self, num_wrong: int) -> None:
        """Subtract `num_wrong` rejected drafts from the token counts."""
        self._with_pending -= num_wrong
        if self.row >= 0:  # a preempted request has no computed tokens
            self._computed -= num_wrong

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )


if not TYPE_CHECKING:  # type checkers report unknown names without it
    __getattr__ = reject_retired(__name__)
