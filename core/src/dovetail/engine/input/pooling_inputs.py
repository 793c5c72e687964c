"""Creates the requests of pooling: tokenizes, truncates, and joins pairs of strings."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from dovetail.engine.input.input_processor import InputProcessor, no_tokenizer
from dovetail.engine.input.prompt_reading import ReadPrompt, cut_before_end, take_token_ids
from dovetail.engine.input.request_checks import check_prompt
from dovetail.errors import RequestError
from dovetail.interfaces.tokenizer import Tokenizer
from dovetail.pooling_params import WHOLE_LENGTH, PoolingParams
from dovetail.request import EngineCoreRequest
from dovetail.sampling_params import SamplingParams
from dovetail.value_checks import guarded

_NO_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
"""The sampling parameters of pooling requests, which sample no token."""


class PoolingInputs:
    """Prepares pooling requests. inputs: checks and tokenizes strings."""

    def __init__(self, inputs: InputProcessor, tokenizer: Tokenizer | None) -> None:
        self._inputs = inputs
        self._facts = inputs.facts
        self._tokenizer = tokenizer

    def prepare(
        self,
        request_id: str,
        read: ReadPrompt,
        params: PoolingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        arrival_ns: int = 0,
    ) -> EngineCoreRequest:
        """Check and tokenize a request, as `InputProcessor.prepare` does."""
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=self._tokens_of(read, params.truncate_prompt_tokens),
            sampling_params=_NO_SAMPLING,
            max_tokens=1,
            priority=priority,
            arrival_ns=arrival_ns,
            cache_salt=cache_salt or read.cache_salt,
            tenant=read.tenant,
            deadline_ns=read.deadline_ns(arrival_ns),
            pooling_params=params,
        )

    def encode_pair(
        self,
        first: str,
        second: str,
        keep_first: int | None = None,
        names: tuple[str, str] = ("prompt", "prompt"),
    ) -> tuple[list[int], int]:
        """Return the token ids of two texts with special tokens, and where the second one starts.

        keep_first: as `PoolingParams.truncate_prompt_tokens`. The start is 0 if the tokenizer does
        not distinguish the texts. names: of the texts in errors. Raises RequestError for a text
        that is too long, and for a pair that cannot be tokenized.
        """
        for name, text in zip(names, (first, second), strict=True):
            self._inputs.check_length(name, text)
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise no_tokenizer(names[1])
        try:
            token_ids, start = guarded("prompt", lambda: tokenizer.encode_pair(first, second))
        except RequestError as error:
            raise error.with_name(names[1]) from None
        if keep_first is not None:
            token_ids = list(self._cut(token_ids, keep_first, is_text=True))
        return token_ids, start if start < len(token_ids) else 0

    def _tokens_of(self, read: ReadPrompt, keep_first: int | None) -> tuple[int, ...]:
        """Return the checked token ids of a prompt, at most the first `keep_first` of them."""
        maximum, content = self._facts.max_model_len, read.content
        if read.text is not None:
            self._inputs.check_length("prompt", read.text)
        if isinstance(content, str):
            content = self._inputs.encode("prompt", content, add_special_tokens=True)
        if keep_first is None:
            token_ids = take_token_ids(
                content, keep_last=None, max_model_len=maximum, num_outputs=0
            )
        else:
            token_ids = self._cut(content, keep_first, isinstance(read.content, str))
        check_prompt(
            token_ids, vocab_size=self._facts.vocab_size, max_model_len=maximum, num_outputs=0
        )
        return token_ids

    def _cut(self, content: Iterable[int], keep_first: int, is_text: bool) -> tuple[int, ...]:
        """Return the first ids, as many as the limit allows.

        is_text: keep the special tokens at the end, and drop the ids before them.
        """
        maximum = self._facts.max_model_len
        limit = maximum if keep_first == WHOLE_LENGTH else min(keep_first, maximum)
        if not is_text or self._tokenizer is None:
            return guarded("prompt", lambda: tuple(islice(content, limit)))
        return cut_before_end(tuple(content), limit, self._tokenizer.special_token_ids)
