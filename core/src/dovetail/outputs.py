"""What a user gets for a request. Names and meaning are those that the users of vLLM know.

These objects belong to whoever receives them. The outputs of one request share the list of the
prompt's tokens. They are not frozen, and take their fields by position too, only because streaming
makes many of them: a frozen one takes three times as long to make, keywords twice as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from dovetail.logprobs import Logprob, LogprobSequence, TokenLogprobs

__all__ = [
    "CompletionOutput",
    "Logprob",
    "LogprobSequence",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "TokenLogprobs",
]


class RequestOutputKind(Enum):
    """How much each RequestOutput of a request holds.

    CUMULATIVE: everything so far. DELTA: what is new. FINAL_ONLY: everything, once, at the end.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    index: its number among the `n` of the request. text: without what ended it, unless asked for.
    token_ids: with the token that ended it. cumulative_logprob: sum over all tokens so far.
    logprobs: one entry a token, a `LogprobSequence`. Both are None unless log-probabilities were
        asked for.
    finish_reason: "stop", "length", "abort" or "error"; None while it continues.
    stop_reason: the stop string, or the stop token's id, that ended it; None for EOS.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Tell whether nothing more will come."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in nanoseconds of the engine's clock.

    first_token_ns, finished_ns: None if it has not happened.
    """

    arrival_ns: int
    first_token_ns: int | None = None
    finished_ns: int | None = None


@dataclass(slots=True)
class RequestOutput:
    """What there is to say of one request.

    prompt: its text, or None if it was given as token ids.
    outputs: completions by rising index; with DELTA only those that have something new.
    prompt_logprobs: one entry a prompt token, None for the first, which follows nothing; with DELTA
        only in the first RequestOutput.
    num_cached_tokens: prompt tokens found in the prefix cache.
    error: what went wrong, where a completion finished with "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
