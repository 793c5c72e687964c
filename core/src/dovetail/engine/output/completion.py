"""The state of one completion: tokens, text, log-probabilities, and its end.

The output processor owns it. Tokens are detokenized when an output needs their text. If there are
stop strings, tokens are detokenized immediately. If the tokenizer has no pieces, tokens are
detokenized at intervals, so that the last output of a long completion does not take long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dovetail.engine.output.detokenizer import Detokenizer, make_detokenizer
from dovetail.engine.output.stop_strings import StopStringFilter
from dovetail.interfaces.scheduler import Finished
from dovetail.interfaces.tokenizer import Tokenizer
from dovetail.logprobs import LogprobStore
from dovetail.outputs import CompletionOutput, LogprobSequence
from dovetail.request import EngineCoreRequest, FinishReason
from dovetail.result import LogprobColumns
from dovetail.sampling_params import SamplingParams

MAX_UNREAD_TOKENS = 64
"""Maximum number of tokens that are detokenized at once if `is_plain` is False."""


class LogprobTexts:
    """The strings of tokens in log-probabilities."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Create an empty table. tokenizer: None for log-probabilities without strings."""
        self._no_texts = _NoTexts()
        self._texts = self._no_texts if tokenizer is None else _TokenTexts(tokenizer)

    def of(self, params: SamplingParams) -> Mapping[int, str | None]:
        """Return the strings by token. A token is detokenized when its text is read."""
        return self._texts if params.detokenize else self._no_texts


class _TokenTexts(dict[int, str | None]):
    """The text of each token. An incomplete character is U+FFFD."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        pieces = self._tokenizer.token_pieces(skip_special_tokens=False)
        piece = self._tokenizer.decode([token]) if pieces is None else pieces[token]
        text = piece if isinstance(piece, str) else piece.decode("utf-8", "replace")
        self[token] = text
        return text


class _NoTexts(dict[int, str | None]):
    """Maps every token to None instead of its text."""

    def __missing__(self, token: int) -> None:
        return None


class Completion:
    """The state of one completion of a request.

    request: the core's request. token_ids: the output so far. is_plain: whether new tokens need
    only be appended to token_ids. finish_reason: None while the completion is unfinished.
    """

    __slots__ = (
        "_detokenizer",
        "_end_sent",
        "_logprobs",
        "_num_hidden",
        "_num_read",
        "_num_sent",
        "_params",
        "_stops",
        "_text",
        "_tokenizer",
        "cumulative_logprob",
        "finish_reason",
        "index",
        "is_plain",
        "request",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        index: int,
        tokenizer: Tokenizer | None,
        texts: LogprobTexts,
    ) -> None:
        params = request.sampling_params
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self._logprobs: LogprobStore | None = None
        if params.logprobs is not None:
            self._logprobs = LogprobStore(texts.of(params))
        self.request = request
        self._params = params
        self._tokenizer = tokenizer if params.detokenize else None
        self._detokenizer: Detokenizer | None = None
        self._stops: StopStringFilter | None = None
        if params.stop_strings and self._tokenizer is not None:
            self._stops = StopStringFilter(
                params.stop_strings,
                include_stop_str_in_output=params.include_stop_str_in_output,
            )
        # Without pieces each token needs a call of `decode`, which would delay the last output.
        has_pieces = self._tokenizer is None or (
            self._tokenizer.token_pieces(skip_special_tokens=params.skip_special_tokens) is not None
        )
        self.is_plain = self._stops is None and self._logprobs is None and has_pieces
        self._text = ""  # the whole text; with DELTA the text that no output has contained
        self._num_read = 0  # number of detokenized tokens
        self._num_hidden = 0  # number of tokens at the end that are not part of the text
        self._num_sent = 0  # number of tokens that DELTA outputs have contained
        self._end_sent = False

    @property
    def has_new_outputs(self) -> bool:
        """Whether the next DELTA output would contain new tokens or the finish reason."""
        return len(self.token_ids) > self._num_sent or (
            self.finish_reason is not None and not self._end_sent
        )

    def append(
        self, token_ids: Sequence[int], logprobs: LogprobColumns | None, ending: Finished | None
    ) -> bool:
        """Add the next tokens. Return True if a stop string in their text ended the completion.

        logprobs: log-probabilities of these tokens, if requested. ending: the end that the core
            reported with these tokens, if any.
        """
        num_kept, stop = len(token_ids), None
        if self._stops is not None:
            hides = ending is not None and self._hides(token_ids[-1], ending)
            num_kept, stop = self._search(self._stops, token_ids, hides=hides)
        self.token_ids.extend(token_ids[:num_kept])
        if logprobs is not None:
            self._add_logprobs(logprobs if num_kept == len(token_ids) else logprobs.first(num_kept))
        num_unread = len(self.token_ids) - self._num_read
        if num_unread >= MAX_UNREAD_TOKENS and ending is None and self._stops is None:
            self._text += self._new_text()
        if stop is not None:
            self._end_with_stop_string(stop)
        return stop is not None

    def finish(self, ending: Finished) -> None:
        """End the completion with the core's finish reason. Do nothing if it has ended."""
        if self.finish_reason is not None:
            return
        self.finish_reason = ending.reason.value
        self.stop_reason = ending.stop_reason
        if self._tokenizer is None:
            return
        if self.token_ids and self._hides(self.token_ids[-1], ending):
            self._num_hidden = 1
        if self._stops is not None:
            # An incomplete character becomes U+FFFD, which may complete a stop string.
            rest = self._cached_detokenizer().flush()
            armed = len(self.token_ids) >= self._params.min_tokens
            shown, stop = self._stops.push(rest, armed=armed)
            self._text += shown
            if stop is None:
                self._text += self._stops.flush()
            else:
                self._end_with_stop_string(stop)

    def output(self) -> CompletionOutput:
        """Return an output with all tokens so far."""
        self._text += self._new_text()
        return CompletionOutput(
            self.index,
            self._text,
            self.token_ids.copy(),
            self.cumulative_logprob,
            None if self._logprobs is None else LogprobSequence(self._logprobs),
            self.finish_reason,
            self.stop_reason,
        )

    def new_output(self) -> CompletionOutput:
        """Return an output with the tokens since the last call."""
        first, self._num_sent = self._num_sent, len(self.token_ids)
        text = self._new_text()
        if self._text:
            text, self._text = self._text + text, ""
        if self.finish_reason is not None:
            self._end_sent = True
        logprobs = self._logprobs
        if logprobs is not None:
            self._logprobs = logprobs.empty()  # the output owns the previous store
        return CompletionOutput(
            self.index,
            text,
            self.token_ids[first:],
            self.cumulative_logprob,
            None if logprobs is None else LogprobSequence(logprobs),
            self.finish_reason,
            self.stop_reason,
        )

    def _new_text(self) -> str:
        """Detokenize the new tokens. Return "" if the search for stop strings has detokenized them.

        Returns all remaining text if the completion has ended.
        """
        if self._stops is not None or self._tokenizer is None:
            return ""
        detokenizer = self._detokenizer or self._cached_detokenizer()
        first, ended = self._num_read, self.finish_reason is not None
        self._num_read = end = len(self.token_ids)
        if not ended:
            return detokenizer.push(self.token_ids[first:])
        return (
            detokenizer.push(self.token_ids[first : end - self._num_hidden]) + detokenizer.flush()
        )

    def _cached_detokenizer(self) -> Detokenizer:
        if self._detokenizer is None:
            assert self._tokenizer is not None
            self._detokenizer = make_detokenizer(
                self._tokenizer,
                self.request.prompt_token_ids,
                skip_special_tokens=self._params.skip_special_tokens,
            )
        return self._detokenizer

    def _search(
        self, stops: StopStringFilter, token_ids: Sequence[int], *, hides: bool
    ) -> tuple[int, str | None]:
        """Detokenize new tokens, one by one, up to a stop string.

        Returns how many of them belong to the completion, and the stop string that ended it.
        hides: whether the last token is not part of the text.
        """
        push, num_before = self._cached_detokenizer().push, len(self.token_ids)
        visible = token_ids[:-1] if hides else token_ids
        for number, token in enumerate(visible, 1):
            armed = num_before + number >= self._params.min_tokens
            shown, stop = stops.push(push((token,)), armed=armed)
            self._text += shown
            if stop is not None:
                return number, stop
        return len(token_ids), None

    def _end_with_stop_string(self, stop: str) -> None:
        self.finish_reason = FinishReason.STOP.value
        self.stop_reason = stop

    def _hides(self, last: int, ending: Finished) -> bool:
        """Whether the last token is a stop token that is not part of the text."""
        return (
            ending.reason is FinishReason.STOP
            and last in self.request.stop_token_ids
            and not self._params.include_stop_str_in_output
        )

    def _add_logprobs(self, columns: LogprobColumns) -> None:
        if self._logprobs is None or self.cumulative_logprob is None:
            return
        self._logprobs.extend(columns)
        start = 0
        for count in columns.counts:
            self.cumulative_logprob += columns.logprobs[start]
            start += count
