"""Creates the core's requests from a user's request: tokens, resolved limits, a seed.

Every check that needs the tokenizer or the model's sizes runs here, once, in the front end; its
error names the parameter. This module does not depend on scheduling or on outputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from dovetail.clock import Clock
from dovetail.engine.input.prompt_reading import ReadPrompt, read_prompt, take_token_ids
from dovetail.engine.input.request_checks import (
    check_params_limits,
    check_place,
    check_prompt,
    check_sampling_tokens,
    check_token_ids,
)
from dovetail.engine.input.tokenizer_checks import check_tokenizer, longest_token_chars
from dovetail.errors import ConfigError, DovetailError, RequestError, nearest
from dovetail.inputs import Prompt
from dovetail.interfaces.requested_config import LimitsConfig
from dovetail.interfaces.tokenizer import Tokenizer
from dovetail.request import EngineCoreRequest
from dovetail.sampling_params import SamplingParams
from dovetail.value_checks import check_text, shorten

SEED_MASK = 2**64 - 1

USUAL_TOKEN_CHARS = 8
"""The character limit of prompts allows at least this many characters per token of
`max_model_len`."""

MAX_DEFAULT_PROMPT_CHARS = 2**24
"""Maximum characters of a prompt for any vocabulary, if `max_prompt_chars` is not set."""


@dataclass(frozen=True, kw_only=True)
class InputFacts:
    """The properties of model and engine that the input processor needs.

    vocab_size: the width of the logits. max_model_len: maximum tokens of prompt and output
    together. eos_token_ids: tokens that end a text. max_logprobs: maximum number of
    log-probabilities per position of a request. default_sampling: fields of SamplingParams for
    requests without parameters; `max_new_tokens` means max_tokens. seed: the engine's seed, from
    which seeds of requests are derived. limits: maximum sizes of client values.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    max_logprobs: int = 20
    default_sampling: Mapping[str, object] = field(default_factory=dict)
    seed: int = 0
    limits: LimitsConfig = field(default_factory=LimitsConfig)


def core_request_id(request_id: str, serial: int) -> str:
    """Return the core's id of a user's request, which is unique even if users reuse ids.

    serial: a number that the front end never uses twice.
    """
    return f"{request_id}~{serial}"


def user_request_id(core_id: str) -> str:
    """Return the user's id from the core id of a request or a completion."""
    return core_id.rpartition("~")[0] or core_id


def completion_id(request_id: str, index: int, n: int) -> str:
    """Return the core's id of completion `index` of a request with `n` completions."""
    return request_id if n == 1 else f"{request_id}#{index}"


def completion_seed(seed: int, index: int) -> int:
    """Return the seed of completion `index`: `seed` for the first one, a hash for the others."""
    if index == 0:
        return seed & SEED_MASK
    return _hash_seed(f"completion:{seed & SEED_MASK}:{index}")


class InputProcessor:
    """Creates core requests. `prepare` may run in several threads, the other methods in one."""

    def __init__(self, info: InputFacts, *, tokenizer: Tokenizer | None, clock: Clock) -> None:
        """Create the processor.

        tokenizer: None if all prompts are token ids. Raises ConfigError for invalid defaults,
        ModelError for a tokenizer of another model.
        """
        if tokenizer is not None:
            check_tokenizer(tokenizer, info.vocab_size)
        self.facts = info
        self._tokenizer = tokenizer
        self._clock = clock
        self._num_requests = 0
        self._default_params = _default_params(info.default_sampling)
        self._max_prompt_chars = info.limits.max_prompt_chars

    def default_params(self) -> SamplingParams:
        """Return the default sampling parameters, which apply to requests without parameters."""
        return self._default_params

    @property
    def max_prompt_chars(self) -> int:
        """Maximum characters of a prompt. The first access may decode the whole vocabulary."""
        if self._max_prompt_chars is None:
            longest = longest_token_chars(self._tokenizer) if self._tokenizer is not None else 1
            maximum = self.facts.max_model_len * max(longest, USUAL_TOKEN_CHARS)
            self._max_prompt_chars = min(maximum, MAX_DEFAULT_PROMPT_CHARS)
        return self._max_prompt_chars

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[EngineCoreRequest]:
        """Return the core requests of a user's request, one for each of `params.n` completions.

        prompt: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; no token is added
            to ids. A mapping may also have the keys of `dovetail.inputs.PromptTraits`.
        params: None for the model's defaults. cache_salt: replaces the prompt's salt, if not "".
        The ids of the core requests are `completion_id(request_id, index, n)`; all share one tuple
        of prompt tokens. Raises RequestError that names the invalid parameter.
        """
        limits = self.facts.limits
        check_place(priority=priority, cache_salt=cache_salt, limits=limits)
        read = read_prompt(prompt, limits)
        first = self.prepare(
            request_id,
            read,
            params,
            priority=priority,
            cache_salt=cache_salt,
            arrival_ns=self._clock.now_ns(),
        )
        return self.complete(first)

    def prepare(
        self,
        request_id: str,
        read: ReadPrompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        arrival_ns: int = 0,
    ) -> EngineCoreRequest:
        """Check a request and tokenize its strings. Return the argument of `complete`.

        priority and cache_salt must be valid. Can run in a thread, because it holds the GIL only
        for milliseconds at a time. Raises RequestError that names the invalid parameter.
        """
        params = self.checked_params(params)
        prompt_token_ids = self._tokens_of(read, params.truncate_prompt_tokens)
        room = self.facts.max_model_len - len(prompt_token_ids)
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens={params.min_tokens} does not fit: the prompt has "
                f"{len(prompt_token_ids)} tokens, which leaves {room} of "
                f"max_model_len={self.facts.max_model_len}. Lower min_tokens or shorten the "
                "prompt.",
                parameter="min_tokens",
            )
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling_params=params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_token_ids=self._stop_token_ids(params),
            bad_words_token_ids=self._bad_words(params.bad_words or ()),
            priority=priority,
            arrival_ns=arrival_ns,
            cache_salt=cache_salt or read.cache_salt,
            tenant=read.tenant,
            deadline_ns=read.deadline_ns(arrival_ns),
        )

    def complete(self, prepared: EngineCoreRequest) -> list[EngineCoreRequest]:
        """Return one request for each completion of a prepared request, with its id and seed."""
        params = prepared.sampling_params
        requests = [
            replace(
                prepared,
                request_id=completion_id(prepared.request_id, index, params.n),
                seed=self._seed(params, index),
            )
            for index in range(params.n)
        ]
        self._num_requests += 1
        return requests

    def checked_params(self, params: SamplingParams | None) -> SamplingParams:
        """Return the parameters, or the defaults for None. Raise RequestError for invalid ones."""
        params = self._default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"params must be SamplingParams, not {type(params).__name__}.", parameter="params"
            )
        params = params.own_copy()
        info = self.facts
        for name, count in (
            ("logprobs", params.logprobs),
            ("prompt_logprobs", params.prompt_logprobs),
        ):
            if count is not None and count > info.max_logprobs:
                raise RequestError(
                    f"{name}={count} is more than this engine's max_logprobs="
                    f"{info.max_logprobs}; request fewer, or start the engine with a larger "
                    "max_logprobs.",
                    parameter=name,
                )
        check_params_limits(params, info.limits)
        check_sampling_tokens(params, info.vocab_size)
        if self._tokenizer is None:
            for name, texts in (("stop", params.stop_strings), ("bad_words", params.bad_words)):
                if texts:
                    raise no_tokenizer(name)
        return params

    def encode_chat(self, text: str) -> Sequence[int]:
        """Return the token ids of a rendered chat template, without adding special tokens."""
        self.check_length("messages", text)
        return self.encode("messages", text, add_special_tokens=False)

    def _tokens_of(self, read: ReadPrompt, keep_last: int | None) -> tuple[int, ...]:
        """Return the checked token ids of a prompt, only the last `keep_last` of them."""
        info, content = self.facts, read.content
        if read.text is not None:
            self.check_length("prompt", read.text)
        if isinstance(content, str):
            content = self.encode("prompt", content, add_special_tokens=True)
        token_ids = take_token_ids(content, keep_last=keep_last, max_model_len=info.max_model_len)
        check_prompt(token_ids, vocab_size=info.vocab_size, max_model_len=info.max_model_len)
        return token_ids

    def check_length(self, parameter: str, text: str) -> None:
        """Raise RequestError, naming the parameter, if a text is too long to be tokenized."""
        # Strings of usual length are accepted without decoding the vocabulary.
        maximum = USUAL_TOKEN_CHARS * self.facts.max_model_len
        if len(text) > maximum or self._max_prompt_chars is not None:
            maximum = self.max_prompt_chars
        check_text(parameter, text, max_chars=maximum, limit="max_prompt_chars")

    def encode(self, parameter: str, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Return the ids of a text. Raise RequestError, naming the parameter, if it has none."""
        if self._tokenizer is None:
            raise no_tokenizer(parameter)
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a tokenizer's panic is not an Exception
            cause = str(error) if isinstance(error, DovetailError) else shorten(error)
            raise RequestError(
                f"{parameter}={shorten(text)} cannot be tokenized: {cause}", parameter=parameter
            ) from error

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        stops = frozenset(params.stop_token_ids or ())
        return stops if params.ignore_eos else stops | self.facts.eos_token_ids

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each word, at the start of a text and after a space."""
        spelled: dict[tuple[int, ...], None] = {}
        for word in dict.fromkeys(words):
            bare = word.lstrip()
            spellings = self._spell(bare), self._spell(" " + bare)
            if not bare or not all(spellings):
                raise RequestError(
                    f"bad_words contains {shorten(word)}, which this model's tokenizer cannot "
                    "encode; omit it.",
                    parameter="bad_words",
                )
            spelled |= dict.fromkeys(spellings)
        for spelling in spelled:
            check_token_ids("bad_words", spelling, self.facts.vocab_size)
        return tuple(spelled)

    def _spell(self, text: str) -> tuple[int, ...]:
        return tuple(self.encode("bad_words", text, add_special_tokens=False))

    def _seed(self, params: SamplingParams, index: int) -> int:
        """Return a completion's seed, from the user's seed or from the engine's seed.

        Without a user's seed it is a hash of the engine's seed, the request's number and `index`,
        so that engines with different seeds use different seeds for all completions.
        """
        if params.seed is not None:
            return completion_seed(params.seed, index)
        return _hash_seed(f"{self.facts.seed}:{self._num_requests}:{index}")


def _hash_seed(origin: str) -> int:
    return int.from_bytes(hashlib.blake2b(origin.encode(), digest_size=8).digest(), "little")


def no_tokenizer(parameter: str) -> RequestError:
    """Return the error for a `parameter` with text if the engine has no tokenizer."""
    return RequestError(
        f"{parameter} contains text, but this engine has no tokenizer: pass token ids, or start "
        "the engine without skip_tokenizer_init.",
        parameter=parameter,
    )


def _default_params(defaults: Mapping[str, object]) -> SamplingParams:
    """Return SamplingParams with the given fields. Raise ConfigError for an invalid field."""
    values = dict(defaults)
    if "max_new_tokens" in values:
        values.setdefault("max_tokens", values.pop("max_new_tokens"))
    known = {entry.name for entry in fields(SamplingParams)}
    for name in values:
        if name not in known:
            raise ConfigError(
                f"generation config: {name!r} is not a sampling parameter.{nearest(name, known)}"
            )
    try:
        return SamplingParams(**values)  # type: ignore[arg-type]  # SamplingParams checks them
    except RequestError as error:
        raise ConfigError(f"generation config: {error}") from error
