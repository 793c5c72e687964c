"""One completion as it grows: tokens, text, log-probabilities, and how it ended.

Owned by the output processor. Text is made as tokens come only where somebody looks at it before
the end (streaming, stop strings); otherwise all at once at the end, which costs a small part.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from dovetail.engine.detokenizer import Detokenizer, detokenize
from dovetail.engine.stop_strings import StopStringFilter
from dovetail.interfaces.scheduler import Finished
from dovetail.interfaces.tokenizer import Tokenizer
from dovetail.outputs import CompletionOutput, Logprob, TokenLogprobs
from dovetail.request import EngineCoreRequest, FinishReason
from dovetail.result import LogprobColumns


class LogprobReader:
    """Turns columns of log-probabilities into what users see, with each token's own text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """tokenizer: None gives log-probabilities without texts."""
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def read(self, columns: LogprobColumns, *, with_text: bool) -> list[TokenLogprobs]:
        """Return one mapping a position: the token that stands there, then the best."""
        entries = zip(columns.token_ids, columns.logprobs, strict=True)
        read = []
        for count, rank in zip(columns.counts, columns.ranks, strict=True):
            here: TokenLogprobs = {}
            for place, (token, logprob) in enumerate(islice(entries, count)):
                if token not in here:
                    text = self._text(token) if with_text else None
                    here[token] = Logprob(logprob, place or rank, text)
            read.append(here)
        return read

    def _text(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode([token])
        return self._texts[token]


class TextStream:
    """The text of one completion while it is generated."""

    __slots__ = ("_detokenizer", "_filter", "_min_tokens", "text")

    def __init__(self, request: EngineCoreRequest, tokenizer: Tokenizer) -> None:
        params = request.sampling_params
        self.text = ""
        self._min_tokens = params.min_tokens
        self._detokenizer = Detokenizer(
            tokenizer,
            request.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
        )
        self._filter = (
            StopStringFilter(
                params.stop_strings,
                include_stop_str_in_output=params.include_stop_str_in_output,
            )
            if params.stop_strings
            else None
        )

    def push(self, token_ids: Sequence[int], num_before: int) -> tuple[int, str | None]:
        """Take the tokens that follow the first `num_before`.

        Returns how many of them belong to the completion, and the stop string that ended it.
        """
        if self._filter is None:
            self.text += self._detokenizer.push(token_ids)
            return len(token_ids), None
        for number, token in enumerate(token_ids, 1):
            armed = num_before + number >= self._min_tokens
            shown, stop = self._filter.push(self._detokenizer.push((token,)), armed=armed)
            self.text += shown
            if stop is not None:
                return number, stop
        return len(token_ids), None

    def close(self) -> str | None:
        """Give out what was held back; return the stop string if that completes one."""
        rest = self._detokenizer.flush()
        if self._filter is None:
            self.text += rest
            return None
        shown, stop = self._filter.push(rest)
        self.text += shown
        if stop is None:
            self.text += self._filter.flush()
        return stop


class Completion:
    """What is known of one completion.

    request: what the core was asked. token_ids: the output so far.
    finish_reason: None while it goes on.
    """

    __slots__ = (
        "_logprobs",
        "_num_sent_chars",
        "_num_sent_tokens",
        "_params",
        "_stream",
        "_text",
        "_tokenizer",
        "_told_end",
        "cumulative_logprob",
        "finish_reason",
        "index",
        "request",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self, request: EngineCoreRequest, index: int, tokenizer: Tokenizer | None, *, watched: bool
    ) -> None:
        """watched: whether outputs are asked for before the end."""
        params = request.sampling_params
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.request = request
        self._params = params
        self._tokenizer = tokenizer if params.detokenize else None
        self._stream: TextStream | None = None
        if self._tokenizer is not None and (watched or params.stop_strings):
            self._stream = TextStream(request, self._tokenizer)
        self._text = ""
        self._num_sent_tokens = 0
        self._num_sent_chars = 0
        self._told_end = False

    @property
    def is_quiet(self) -> bool:
        """Whether new tokens need only be appended to `token_ids`."""
        return self._stream is None and self._logprobs is None

    @property
    def has_news(self) -> bool:
        """Whether there is something that no output of kind DELTA has shown yet."""
        return (
            len(self.token_ids) > self._num_sent_tokens
            or len(self.text) > self._num_sent_chars
            or (self.finish_reason is not None and not self._told_end)
        )

    @property
    def text(self) -> str:
        """The text so far; empty while it is left for the end."""
        return self._text if self._stream is None else self._stream.text

    def append(
        self, token_ids: Sequence[int], logprobs: list[TokenLogprobs], ending: Finished | None
    ) -> bool:
        """Take the next tokens; return True if a stop string among them ended the completion.

        logprobs: one entry a token, or empty. ending: how the core ended it with these, if it did.
        """
        num_kept, stop = len(token_ids), None
        if self._stream is not None:
            spoken = token_ids
            if ending is not None and self._hides(token_ids[-1], ending):
                spoken = token_ids[:-1]
            num_spoken, stop = self._stream.push(spoken, len(self.token_ids))
            num_kept = num_spoken if stop is not None else num_kept
        self.token_ids.extend(token_ids[:num_kept])
        if self._logprobs is not None:
            self._add_logprobs(token_ids[:num_kept], logprobs[:num_kept])
        if stop is not None:
            self._end_with_stop_string(stop)
        return stop is not None

    def finish(self, ending: Finished) -> None:
        """End it as the core says; a completion that has ended stays as it is."""
        if self.finish_reason is not None:
            return
        self.finish_reason = ending.reason.value
        self.stop_reason = ending.stop_reason
        if self._stream is not None:
            if (stop := self._stream.close()) is not None:
                self._end_with_stop_string(stop)
        elif self._tokenizer is not None:
            spoken = self.token_ids
            if spoken and self._hides(spoken[-1], ending):
                spoken = spoken[:-1]
            self._text = detokenize(
                self._tokenizer,
                self.request.prompt_token_ids,
                spoken,
                skip_special_tokens=self._params.skip_special_tokens,
            )

    def output(self, *, delta: bool) -> CompletionOutput:
        """Return everything so far, or with `delta` what is new since it was called last."""
        first_token, first_char = 0, 0
        text = self.text
        if delta:
            first_token, first_char = self._num_sent_tokens, self._num_sent_chars
            self._num_sent_tokens, self._num_sent_chars = len(self.token_ids), len(text)
            self._told_end = self.finish_reason is not None
        return CompletionOutput(
            index=self.index,
            text=text[first_char:],
            token_ids=self.token_ids[first_token:],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs[first_token:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _end_with_stop_string(self, stop: str) -> None:
        self.finish_reason = FinishReason.STOP.value
        self.stop_reason = stop

    def _hides(self, last: int, ending: Finished) -> bool:
        """Whether the last token ended the completion and is not to be read in the text."""
        return (
            ending.reason is FinishReason.STOP
            and last in self.request.stop_token_ids
            and not self._params.include_stop_str_in_output
        )

    def _add_logprobs(self, token_ids: Sequence[int], logprobs: list[TokenLogprobs]) -> None:
        if self._logprobs is None or self.cumulative_logprob is None:
            return
        self._logprobs.extend(logprobs)
        for token, here in zip(token_ids, logprobs, strict=True):
            self.cumulative_logprob += here[token].logprob
