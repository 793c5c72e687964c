"""From what a user asks to what the engine core gets: tokens, resolved limits, a seed.

Everything that needs the tokenizer or the model's sizes happens here, once, in the front end, and
each refusal names its parameter. Does not depend on scheduling or on what becomes of a request.
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
"""Prompts of so many characters for each token that fits are not too long in any vocabulary."""

MAX_DEFAULT_PROMPT_CHARS = 2**24
"""Most characters of a prompt where `max_prompt_chars` is not set, whatever the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class InputFacts:
    """What the input processor has to know of model and engine.

    vocab_size: the width of the logits. max_model_len: tokens, prompt and output together.
    eos_token_ids: tokens that end a text. max_logprobs: most that a request may ask for.
    default_sampling: fields of SamplingParams for requests that bring none; `max_new_tokens` is
        taken for max_tokens. seed: the engine's; seeds of requests derive from it. limits: sizes
        of what clients give.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    max_logprobs: int = 20
    default_sampling: Mapping[str, object] = field(default_factory=dict)
    seed: int = 0
    limits: LimitsConfig = field(default_factory=LimitsConfig)


def core_request_id(request_id: str, serial: int) -> str:
    """Return the core's id of a user's request; no other one has it, whatever users call theirs.

    serial: of the front end, never used twice.
    """
    return f"{request_id}~{serial}"


def user_request_id(core_id: str) -> str:
    """Return the user's id in an id of the core, be it a completion's or not."""
    return core_id.rpartition("~")[0] or core_id


def completion_id(request_id: str, index: int, n: int) -> str:
    """Return the core's id of completion `index` of a request that wants `n` of them."""
    return request_id if n == 1 else f"{request_id}#{index}"


def completion_seed(seed: int, index: int) -> int:
    """Return the seed of completion `index`: the user's for the first, a hash for the others."""
    if index == 0:
        return seed & SEED_MASK
    return _hash_seed(f"completion:{seed & SEED_MASK}:{index}")


class InputProcessor:
    """Makes core requests. `prepare` may run in several threads, the other methods in one."""

    def __init__(self, facts: InputFacts, *, tokenizer: Tokenizer | None, clock: Clock) -> None:
        """tokenizer: None if prompts come as token ids only.

        Raises ConfigError for bad defaults, ModelError for a tokenizer of another model.
        """
        if tokenizer is not None:
            check_tokenizer(tokenizer, facts.vocab_size)
        self._facts = facts
        self._tokenizer = tokenizer
        self._clock = clock
        self._num_requests = 0
        self._default_params = _default_params(facts.default_sampling)
        self._max_prompt_chars = facts.limits.max_prompt_chars

    def default_params(self) -> SamplingParams:
        """Return what a request without sampling parameters gets."""
        return self._default_params

    @property
    def max_prompt_chars(self) -> int:
        """Characters that a prompt may have; found by decoding every token once, when needed."""
        if self._max_prompt_chars is None:
            longest = longest_token_chars(self._tokenizer) if self._tokenizer is not None else 1
            most = self._facts.max_model_len * max(longest, USUAL_TOKEN_CHARS)
            self._max_prompt_chars = min(most, MAX_DEFAULT_PROMPT_CHARS)
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
        """Return the core requests of one request, one for each of its `params.n` completions.

        prompt: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; ids are taken as
            they are. A mapping may also have what `dovetail.inputs.PromptTraits` names.
        params: None for the model's defaults. cache_salt: before the prompt's own.
        Their ids are `completion_id(request_id, index, n)`; all share one tuple of prompt tokens.
        Raises RequestError naming the parameter at fault.
        """
        limits = self._facts.limits
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
        """Check a request and tokenize its texts; return it for `complete`, without a seed.

        priority and cache_salt have been checked. Holds the interpreter for milliseconds at a time
        only, so that it can run in a thread. Raises RequestError naming the parameter at fault.
        """
        params = self.checked_params(params)
        prompt_token_ids = self._tokens_of(read, params.truncate_prompt_tokens)
        room = self._facts.max_model_len - len(prompt_token_ids)
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens={params.min_tokens} does not fit: the prompt has "
                f"{len(prompt_token_ids)} tokens, which leaves {room} of "
                f"max_model_len={self._facts.max_model_len}. Lower it or shorten the prompt.",
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
        """Return the requests of a prepared one's completions, each with its id and its seed."""
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
        """Return the parameters or the defaults; raise RequestError for what is no such thing."""
        params = self._default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"params must be SamplingParams, not {type(params).__name__}.", parameter="params"
            )
        params = params.own_copy()
        facts = self._facts
        for name, asked in (
            ("logprobs", params.logprobs),
            ("prompt_logprobs", params.prompt_logprobs),
        ):
            if asked is not None and asked > facts.max_logprobs:
                raise RequestError(
                    f"{name}={asked} is more than this engine's max_logprobs="
                    f"{facts.max_logprobs}; ask for fewer, or start it with more.",
                    parameter=name,
                )
        check_params_limits(params, facts.limits)
        check_sampling_tokens(params, facts.vocab_size)
        if self._tokenizer is None:
            for name, texts in (("stop", params.stop_strings), ("bad_words", params.bad_words)):
                if texts:
                    raise _no_tokenizer(name)
        return params

    def encode_chat(self, text: str) -> Sequence[int]:
        """Return the ids of a rendered chat template, which holds its own special tokens."""
        self._check_length("messages", text)
        return self._encode("messages", text, add_special_tokens=False)

    def _tokens_of(self, read: ReadPrompt, keep_last: int | None) -> tuple[int, ...]:
        """Return the checked ids of a text or of ids, only the last `keep_last` of them."""
        facts, given = self._facts, read.content
        if read.text is not None:
            self._check_length("prompt", read.text)
        if isinstance(given, str):
            given = self._encode("prompt", given, add_special_tokens=True)
        token_ids = take_token_ids(given, keep_last=keep_last, max_model_len=facts.max_model_len)
        check_prompt(token_ids, vocab_size=facts.vocab_size, max_model_len=facts.max_model_len)
        return token_ids

    def _check_length(self, parameter: str, text: str) -> None:
        # Texts of usual length are told from others without looking at the vocabulary.
        most = USUAL_TOKEN_CHARS * self._facts.max_model_len
        if len(text) > most or self._max_prompt_chars is not None:
            most = self.max_prompt_chars
        check_text(parameter, text, max_chars=most, limit="max_prompt_chars")

    def _encode(self, parameter: str, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        if self._tokenizer is None:
            raise _no_tokenizer(parameter)
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a tokenizer's panic is not an Exception
            told = str(error) if isinstance(error, DovetailError) else shorten(error)
            raise RequestError(
                f"{parameter}={shorten(text)} cannot be tokenized: {told}", parameter=parameter
            ) from error

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        asked = frozenset(params.stop_token_ids or ())
        return asked if params.ignore_eos else asked | self._facts.eos_token_ids

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each word as it begins a text and as it follows a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in dict.fromkeys(words):
            bare = word.lstrip()
            spellings = self._spell(bare), self._spell(" " + bare)
            if not bare or not all(spellings):
                raise RequestError(
                    f"bad_words contains {shorten(word)}, which is not a token of this model; "
                    "leave it out.",
                    parameter="bad_words",
                )
            found |= dict.fromkeys(spellings)
        for spelling in found:
            check_token_ids("bad_words", spelling, self._facts.vocab_size)
        return tuple(found)

    def _spell(self, text: str) -> tuple[int, ...]:
        return tuple(self._encode("bad_words", text, add_special_tokens=False))

    def _seed(self, params: SamplingParams, index: int) -> int:
        """Return a completion's seed: of the user's, or of the engine's and the request's number.

        A hash of seed and index, so that no completion of one seed is one of another seed.
        """
        if params.seed is not None:
            return completion_seed(params.seed, index)
        return _hash_seed(f"{self._facts.seed}:{self._num_requests}:{index}")


def _hash_seed(origin: str) -> int:
    return int.from_bytes(hashlib.blake2b(origin.encode(), digest_size=8).digest(), "little")


def _no_tokenizer(parameter: str) -> RequestError:
    return RequestError(
        f"{parameter} as text needs a tokenizer, and this engine has none: give token ids, or "
        "start it without skip_tokenizer_init.",
        parameter=parameter,
    )


def _default_params(wishes: Mapping[str, object]) -> SamplingParams:
    """Return SamplingParams with the given fields; raise ConfigError if one is unknown or bad."""
    wishes = dict(wishes)
    if "max_new_tokens" in wishes:
        wishes.setdefault("max_tokens", wishes.pop("max_new_tokens"))
    known = {entry.name for entry in fields(SamplingParams)}
    for name in wishes:
        if name not in known:
            raise ConfigError(
                f"generation config: {name!r} is not a sampling parameter.{nearest(name, known)}"
            )
    try:
        return SamplingParams(**wishes)  # type: ignore[arg-type]  # SamplingParams checks them
    except RequestError as error:
        raise ConfigError(f"generation config: {error}") from error
