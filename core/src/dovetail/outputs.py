"""What a user gets for a request. Names and meaning are those that the users of vLLM know.

These objects belong to whoever receives them. The outputs of one request share the list of the
prompt's tokens. They are not frozen, and take their fields by position too, only because streaming
makes many of them: a frozen one takes three times as long to make, keywords twice as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import eq as _equal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.logprob_store import LogprobStore


class RequestOutputKind(Enum):
    """How much each RequestOutput of a request holds.

    CUMULATIVE: everything so far. DELTA: what is new. FINAL_ONLY: everything, once, at the end.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(slots=True)
class Logprob:
    """How likely a token was.

    logprob: natural logarithm. rank: 1 is the most likely token of the vocabulary.
    decoded_token: the token's own text, or None where nothing is detokenised.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""Token id to how likely it was: the token that stands there first, then the best, best first."""


class LogprobSequence(Sequence[Any]):
    """The log-probabilities of successive tokens: a read-only sequence of `TokenLogprobs`.

    They are kept as columns of numbers, 8 bytes an entry; each access makes a new dictionary of
    `Logprob` objects. An entry is None where nothing is known: the first token of a prompt.
    Compares equal to a list of the same entries; a slice, and a sum with a list, is a list.
    """

    __slots__ = ("_num_positions", "_store")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, store: LogprobStore) -> None:
        """store: is shown as it is now; what is added to it later is not shown."""
        self._store = store
        self._num_positions = len(store)

    def __len__(self) -> int:
        return self._num_positions

    def __getitem__(self, index: int | slice) -> Any:
        found = range(self._num_positions)[index]  # raises IndexError, and counts from the end
        if isinstance(found, range):
            return [self._store.at(position) for position in found]
        return self._store.at(found)

    def __iter__(self) -> Iterator[TokenLogprobs | None]:
        return map(self._store.at, range(self._num_positions))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | LogprobSequence):
            return NotImplemented
        return len(self) == len(other) and all(map(_equal, self, other))

    def __add__(self, other: Sequence[Any]) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: Sequence[Any]) -> list[Any]:
        return [*other, *self]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # a copy is a list, which holds no tokenizer


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    index: its number among the `n` of the request. text: without what ended it, unless asked for.
    token_ids: with the token that ended it. cumulative_logprob: sum over all tokens so far.
    logprobs: one entry a token, a `LogprobSequence`. Both are None unless log-probabilities were
        asked for.
    finish_reason: "stop", "length", "abort" or "error"; None while it goes on.
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
