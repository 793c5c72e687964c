"""From what a user asks to what the engine core gets: tokens, resolved limits, a seed.

Everything that needs the tokenizer or the model's sizes happens here, once, in the front end, and
each refusal names its parameter. Knows nothing of scheduling and of what becomes of a request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from dovetail.clock import Clock
from dovetail.engine.prompt_reading import read_prompt
from dovetail.engine.request_checks import (
    check_place,
    check_prompt,
    check_sampling_tokens,
    check_token_ids,
)
from dovetail.engine.tokenizer_checks import check_tokenizer
from dovetail.errors import ConfigError, RequestError, nearest
from dovetail.inputs import Prompt
from dovetail.interfaces.tokenizer import Tokenizer
from dovetail.request import EngineCoreRequest
from dovetail.sampling_params import SamplingParams

SEED_MASK = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class InputFacts:
    """What the input processor has to know of model and engine.

    vocab_size: the width of the logits. max_model_len: tokens, prompt and output together.
    eos_token_ids: tokens that end a text. max_logprobs: most that a request may ask for.
    default_sampling: fields of SamplingParams for requests that bring none; `max_new_tokens` is
        taken for max_tokens. seed: the engine's; seeds of requests derive from it.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    max_logprobs: int = 20
    default_sampling: Mapping[str, object] = field(default_factory=dict)
    seed: int = 0


def completion_id(request_id: str, index: int, n: int) -> str:
    """Return the core's id of completion `index` of a request that wants `n` of them."""
    return request_id if n == 1 else f"{request_id}#{index}"


class InputProcessor:
    """Makes core requests. Not thread-safe: it counts the requests that it has seen."""

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

    def default_params(self) -> SamplingParams:
        """Return what a request without sampling parameters gets."""
        return self._default_params

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
        params = self._default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"params must be SamplingParams, not {type(params).__name__}.", parameter="params"
            )
        facts = self._facts
        self._check_params(params)
        check_place(priority=priority, cache_salt=cache_salt)
        read = read_prompt(prompt)
        prompt_token_ids = self._tokens_of(read.content, params.truncate_prompt_tokens)
        room = facts.max_model_len - len(prompt_token_ids)
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens={params.min_tokens} does not fit: the prompt has "
                f"{len(prompt_token_ids)} tokens, which leaves {room} of "
                f"max_model_len={facts.max_model_len}. Lower it or shorten the prompt.",
                parameter="min_tokens",
            )
        now_ns = self._clock.now_ns()
        first = EngineCoreRequest(
            request_id=completion_id(request_id, 0, params.n),
            prompt_token_ids=prompt_token_ids,
            sampling_params=params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_token_ids=self._stop_token_ids(params),
            bad_words_token_ids=self._bad_words(params.bad_words or ()),
            seed=self._seed(params, 0),
            priority=priority,
            arrival_ns=now_ns,
            cache_salt=cache_salt or read.cache_salt,
            tenant=read.tenant,
            deadline_ns=read.deadline_ns(now_ns),
        )
        others = [
            replace(
                first,
                request_id=completion_id(request_id, index, params.n),
                seed=self._seed(params, index),
            )
            for index in range(1, params.n)
        ]
        self._num_requests += 1
        return [first, *others]

    def _check_params(self, params: SamplingParams) -> None:
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
        check_sampling_tokens(params, facts.vocab_size)
        if self._tokenizer is None:
            for name, texts in (("stop", params.stop_strings), ("bad_words", params.bad_words)):
                if texts:
                    raise _no_tokenizer(name)

    def _tokens_of(self, given: str | Sequence[int], most: int | None) -> tuple[int, ...]:
        """Return the checked ids of a text or of ids, only the last `most` of them."""
        if isinstance(given, str):
            if self._tokenizer is None:
                raise _no_tokenizer("prompt")
            given = self._tokenizer.encode(given)
        token_ids = tuple(given if most is None else given[-most:])
        facts = self._facts
        check_prompt(token_ids, vocab_size=facts.vocab_size, max_model_len=facts.max_model_len)
        return token_ids

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        asked = frozenset(params.stop_token_ids or ())
        return asked if params.ignore_eos else asked | self._facts.eos_token_ids

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each word as it begins a text and as it follows a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip()
            spellings = self._spell(bare), self._spell(" " + bare)
            if not bare or not all(spellings):
                raise RequestError(
                    f"bad_words holds {word!r}, which is no token of this model; leave it out.",
                    parameter="bad_words",
                )
            found |= dict.fromkeys(spellings)
        for spelling in found:
            check_token_ids("bad_words", spelling, self._facts.vocab_size)
        return tuple(found)

    def _spell(self, text: str) -> tuple[int, ...]:
        if self._tokenizer is None:
            raise _no_tokenizer("bad_words")
        try:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))
        except RequestError as error:
            raise RequestError(f"bad_words: {error}", parameter="bad_words") from error

    def _seed(self, params: SamplingParams, index: int) -> int:
        """Return the user's seed plus the completion's number, or one derived from the engine's."""
        if params.seed is not None:
            return (params.seed + index) & SEED_MASK
        origin = f"{self._facts.seed}:{self._num_requests}:{index}".encode()
        return int.from_bytes(hashlib.blake2b(origin, digest_size=8).digest(), "little")


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
                f"generation config: {name!r} is no sampling parameter.{nearest(name, known)}"
            )
    try:
        return SamplingParams(**wishes)  # type: ignore[arg-type]  # SamplingParams checks them
    except RequestError as error:
        raise ConfigError(f"generation config: {error}") from error
