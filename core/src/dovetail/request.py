"""A request inside the engine: its tokens, how far they are computed, and where it stands.

One object per request, mutable, slotted, owned by the scheduler that it was added to: nobody else
writes to it. Policies see it as a read-only `RequestView` (`dovetail.interfaces.policy`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

from dovetail.retired_names import refuse_retired
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
class EncoderInput:
    """Multimodal content whose encoder output takes the place of some prompt tokens.

    position, num_tokens: the placeholder tokens [position, position + num_tokens) of the prompt.
    content_hash: names the content; equal hashes promise equal encoder outputs. Not empty.
    """

    position: int
    num_tokens: int
    content_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreRequest:
    """One request as a front end hands it to the engine core. Immutable; crosses the wire.

    prompt_token_ids: int32 ids, at least one. max_tokens: resolved, ≥ 1.
    stop_token_ids: tokens that end it, EOS among them unless it is ignored.
    bad_words_token_ids: token sequences that may not be completed.
    seed: 64 bit; always set, so that the tokens do not depend on the batch mates.
    priority: lower is served first, by schedulers that look at it.
    cache_salt: requests share cached prefixes only with those of the same salt.
    tenant: on whose behalf it runs, for policies that share out by tenant; "" for no tenant.
    deadline_ns: when its first token is due, on the engine's clock, for policies that look at it;
        0: never.
    lora_id: the adapter that it runs with; "" for the bare model.
    encoder_inputs: multimodal content, by position; placeholders do not overlap.
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


class SharedStepCounter:
    """Steps that requests have run side by side, one token each: one counter for all of them."""

    __slots__ = ("num_steps",)

    def __init__(self) -> None:
        self.num_steps = 0


STATIC_COUNTER = SharedStepCounter()
"""Of requests that keep their own count; it never moves."""


class Request:
    """A request in a scheduler's hands.

    token_ids: int32; the prompt, then the generated tokens.
    num_computed_tokens: tokens whose keys and values are in the cache once the plans handed out so
        far are executed, if every draft that they verify is right.
    num_tokens_with_pending: its tokens once the results of those plans are in, if every draft is
        right. The count in flight, `num_in_flight`, is what that is more than `num_tokens`. When a
        result reports wrong drafts, both counts go back by their number.
    max_drafts: most drafts that a worker holds for it. num_drafts: those that it held after the
        last result.
    max_total_tokens: the length at which it is finished, prompt included.
    row: the worker's row while it runs, -1 otherwise.
    encoder_end: the position after its last placeholder token; 0 if it has none.
    num_cached_tokens: prompt tokens found in the prefix cache at its first admission, or -1.
    num_lost_tokens: computed before its last eviction; 0 while it runs.
    num_prompt_logprobs: prompt positions whose log-probabilities have been handed out.
    blocks, capacity, block_hashes, num_committed_blocks, num_dropped_blocks: the KV cache
        manager's; one list of block ids a group, and the tokens that they hold.
    pace: of those that it runs side by side with; both counts of tokens move with it.
    admission, event_step: place in the order of admissions, and the step of the pace at which
        something happens to it that is not the same for all.
    """

    __slots__ = (
        "_computed",
        "_with_pending",
        "admission",
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
        ends = (one.position + one.num_tokens for one in asked.encoder_inputs)
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
        """Tokens whose keys and values are in the cache, or on their way."""
        return self._computed + self.step_counter.num_steps

    @num_computed_tokens.setter
    def num_computed_tokens(self, count: int) -> None:
        self._computed = count - self.step_counter.num_steps

    @property
    def num_tokens_with_pending(self) -> int:
        """Tokens known or in flight."""
        return self._with_pending + self.step_counter.num_steps

    @num_tokens_with_pending.setter
    def num_tokens_with_pending(self, count: int) -> None:
        self._with_pending = count - self.step_counter.num_steps

    def use_counter(self, step_counter: SharedStepCounter) -> None:
        """Move with `step_counter` from now on; the counts are what they were."""
        behind = self.step_counter.num_steps - step_counter.num_steps
        self._computed += behind
        self._with_pending += behind
        self.step_counter = step_counter

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.token_ids)

    @property
    def num_in_flight(self) -> int:
        """Tokens that plans in flight may still bring."""
        return self._with_pending + self.step_counter.num_steps - len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens known or in flight, and drafts, to be computed; 0 if its last is in flight.

        How many drafts there are is known when nothing is in flight; else as many as there can be.
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
        """Note that so many of the drafts that were in flight are wrong."""
        self._with_pending -= num_wrong
        if self.row >= 0:  # else it was preempted, and nothing of it is computed
            self._computed -= num_wrong

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )


if not TYPE_CHECKING:  # a type checker reports an unknown name itself
    __getattr__ = refuse_retired(__name__)
