"""Checks of a request that need the model's sizes, shared by front end and engine.

The checks are fast and need no tokenizer and no state. The front end runs them to report errors
early. The engine runs them again, because it does not trust front ends.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain

from dovetail.engine.input.prompt_reading import DEFAULT_LIMITS
from dovetail.errors import RequestError, UserError
from dovetail.int_columns import all_below
from dovetail.interfaces.requested_config import LimitsConfig
from dovetail.interfaces.sampling_support import missing_capability
from dovetail.interfaces.scheduler import PauseScope
from dovetail.request import EncoderInput, EngineCoreRequest
from dovetail.sampling_params import SamplingParams
from dovetail.value_checks import (
    check_integer,
    check_text,
    invalid,
    plain_copy,
    plain_text,
    shorten,
    take_items,
)

SLEEP_TAGS = frozenset({"weights", "kv_cache"})
"""Kinds of memory that a worker frees while it sleeps."""

CORE_ID_CHARS = 64
"""Characters that front ends may add to a user's id in `EngineCoreRequest.request_id`."""

MAX_REQUEST_IDS = 2**20
"""Maximum number of ids in one call of abort."""

ID_CHUNK = 2**12
"""Number of ids that are read at a time."""

MAX_TOKENS_PER_CHAR = 4
"""Maximum number of tokens for a character of a bad word: one for each byte of UTF-8."""


def check_token_ids(parameter: str, token_ids: Iterable[object], vocab_size: int) -> None:
    """Raise RequestError for `parameter` unless each id is an integer from 0 to vocab_size - 1."""
    typecode = token_ids.typecode if isinstance(token_ids, array) else " "
    if typecode == "i" and all_below(token_ids, vocab_size):  # type: ignore[arg-type]
        return
    known_ints = typecode in "bBhHiIlLqQ"
    ids = token_ids if isinstance(token_ids, (Sequence, frozenset)) else tuple(token_ids)
    if not ids:
        return
    if not known_ints and set(map(type, ids)) != {int}:
        wrong = next(token for token in ids if type(token) is not int)
        raise RequestError(
            f"{parameter} contains {shorten(wrong)} of the type {type(wrong).__name__}; token ids "
            "must have the type int.",
            parameter=parameter,
        )
    for wrong in (min(ids), max(ids)):
        if not 0 <= wrong < vocab_size:
            raise RequestError(
                f"{parameter} contains the token id {shorten(wrong)}, but the model's vocabulary "
                f"has ids from 0 to {vocab_size - 1}.",
                parameter=parameter,
            )


def check_prompt(
    token_ids: Sequence[int], *, vocab_size: int, max_model_len: int, num_outputs: int = 1
) -> None:
    """Raise RequestError if the prompt is empty or too long, or has an invalid token id.

    num_outputs: output tokens for which `max_model_len` must leave room: 0 for pooling.
    """
    if not isinstance(token_ids, Sequence) and not isinstance(token_ids, array):
        raise RequestError(
            f"prompt_token_ids has the type {type(token_ids).__name__}; pass a sequence of token "
            "ids.",
            parameter="prompt",
        )
    if not token_ids:
        raise RequestError(
            "the prompt is empty; pass at least one token or character.", parameter="prompt"
        )
    longest = max_model_len - num_outputs
    if len(token_ids) > longest:
        room = " must leave room for one output token" if num_outputs else ""
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens, but at most {longest} fit: "
            f"max_model_len={max_model_len}{room}. Shorten the "
            f"prompt, or set truncate_prompt_tokens={longest}.",
            parameter="prompt",
        )
    check_token_ids("prompt", token_ids, vocab_size)


def check_sampling_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError if a token id in `params` is not in the vocabulary.

    Otherwise `params` must be valid.
    """
    for name, ids in (
        ("logit_bias", params.logit_bias),
        ("allowed_token_ids", params.allowed_token_ids),
        ("stop_token_ids", params.stop_token_ids),
    ):
        if ids and max(ids) >= vocab_size:
            check_token_ids(name, (max(ids),), vocab_size)


def check_sampling_support(params: SamplingParams, worker_provides: frozenset[str]) -> None:
    """Raise RequestError for the first field of `params` that the worker does not implement."""
    missing = missing_capability(params, worker_provides)
    if missing is None:
        return
    name, capability = missing
    raise RequestError(
        f"{name}={shorten(getattr(params, name))} needs a worker with the capability "
        f"{capability!r}, which this engine's worker does not declare. Omit {name}, or choose "
        f"a worker_cls that has {capability!r} in `provides`.",
        parameter=name,
    )


def validate_core_request(
    request: EngineCoreRequest,
    *,
    vocab_size: int,
    max_model_len: int,
    worker_provides: frozenset[str] = frozenset(),
    limits: LimitsConfig = DEFAULT_LIMITS,
    valid_params: SamplingParams | None = None,
) -> None:
    """Check a request that the engine received. Raise RequestError for an invalid parameter.

    vocab_size: the width of the logits. worker_provides: the worker's capability ids. limits:
    maximum sizes of strings and lists. valid_params: an immutable object that has passed the
    checks; it is not checked again. Does not change the request.
    """
    _check_id("request_id", request.request_id, limits, more=CORE_ID_CHARS, min_chars=1)
    if not isinstance(request.sampling_params, SamplingParams):
        raise RequestError(
            "sampling_params must be an instance of SamplingParams.", parameter="sampling_params"
        )
    pools = request.pooling_params is not None
    check_prompt(
        request.prompt_token_ids,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        num_outputs=0 if pools else 1,
    )
    if pools and request.max_tokens != 1:
        raise invalid("max_tokens", request.max_tokens, "1 for a pooling request")
    check_integer("max_tokens", request.max_tokens, 1, 2**31 - 1)
    check_integer("seed", request.seed, 0, 2**64 - 1)
    check_integer("arrival_ns", request.arrival_ns, 0, 2**63 - 1)
    check_integer("deadline_ns", request.deadline_ns, 0, 2**63 - 1)
    check_place(priority=request.priority, cache_salt=request.cache_salt, limits=limits)
    _check_id("tenant", request.tenant, limits)
    _check_id("lora_id", request.lora_id, limits)
    if request.lora_id:
        _check_provided("lora_id", "lora", worker_provides)
    if request.encoder_inputs:
        _check_provided("encoder_inputs", "encoder", worker_provides)
        check_encoder_inputs(request.encoder_inputs, len(request.prompt_token_ids))
    if request.sampling_params is not valid_params:
        request.sampling_params.validate()
        check_params_limits(request.sampling_params, limits)
        check_sampling_support(request.sampling_params, worker_provides)
        check_sampling_tokens(request.sampling_params, vocab_size)
    if not isinstance(request.stop_token_ids, frozenset):
        raise invalid("stop_token_ids", request.stop_token_ids, "a frozenset of token ids")
    check_token_ids("stop_token_ids", request.stop_token_ids, vocab_size)
    _check_bad_words(request.bad_words_token_ids, vocab_size, limits)


class CoreRequestChecker:
    """Checks the requests of one engine with `validate_core_request`.

    Requests often share their sampling parameters. Shared parameters are checked only once.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        worker_provides: frozenset[str] = frozenset(),
        limits: LimitsConfig = DEFAULT_LIMITS,
    ) -> None:
        """Create the checker. The arguments are those of `validate_core_request`."""
        self._check = partial(
            validate_core_request,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            worker_provides=worker_provides,
            limits=limits,
        )
        self._valid_params: SamplingParams | None = None

    def check(self, request: EngineCoreRequest) -> None:
        """Raise RequestError for an invalid parameter."""
        self._check(request, valid_params=self._valid_params)
        params = request.sampling_params
        has_mappings = bool(params.logit_bias or params.extra_args)  # which a caller can change
        self._valid_params = None if has_mappings else params


def _check_bad_words(words: object, vocab_size: int, limits: LimitsConfig) -> None:
    if not words:
        return
    if not isinstance(words, tuple) or not all(isinstance(word, tuple) for word in words):
        raise invalid("bad_words", words, "a tuple of tuples of token ids")
    if not all(words):
        raise RequestError(
            "bad_words contains a word without tokens; omit it.", parameter="bad_words"
        )
    # Each word has two spellings, with and without a space before it.
    chars = limits.max_bad_words_chars + limits.max_bad_words
    max_sequences, max_tokens = 2 * limits.max_bad_words, 2 * MAX_TOKENS_PER_CHAR * chars
    num_tokens = sum(map(len, words))
    if len(words) > max_sequences or num_tokens > max_tokens:
        raise RequestError(
            f"bad_words has {len(words)} token sequences with {num_tokens} tokens; the limits are "
            f"{max_sequences} sequences (max_bad_words={limits.max_bad_words}) and {max_tokens} "
            f"tokens (max_bad_words_chars={limits.max_bad_words_chars}).",
            parameter="bad_words",
        )
    check_token_ids("bad_words", tuple(chain.from_iterable(words)), vocab_size)


def check_place(
    *, priority: object, cache_salt: object, limits: LimitsConfig = DEFAULT_LIMITS
) -> None:
    """Raise RequestError unless priority fits in 64 bits and cache_salt is a short string."""
    check_integer("priority", priority, -(2**63), 2**63 - 1)
    _check_id("cache_salt", cache_salt, limits)


def check_request_id(request_id: object, limits: LimitsConfig) -> str:
    """Return a user's id as a plain str. Raise RequestError if it is empty, long or not Unicode."""
    return _check_id("request_id", request_id, limits, min_chars=1)


def read_request_ids(request_ids: object) -> list[str]:
    """Return one id or an iterable of ids as a list of plain strings.

    Raises RequestError for any other value, and for more than `MAX_REQUEST_IDS` ids.
    """
    return [request_id for chunk in request_id_chunks(request_ids) for request_id in chunk]


def request_id_chunks(request_ids: object) -> Iterator[list[str]]:
    """Yield the ids of `read_request_ids` in lists of `ID_CHUNK` ids. Reading a list takes 1 ms."""
    if issubclass(type(request_ids), str):
        request_ids = [request_ids]
    if not isinstance(request_ids, Iterable) or isinstance(
        request_ids, (bytes, bytearray, memoryview)
    ):
        raise invalid("request_ids", request_ids, "a request id or a list of them")
    ids = take_items("request_ids", request_ids, MAX_REQUEST_IDS, what="ids")
    for start in range(0, len(ids), ID_CHUNK):
        chunk = ids[start : start + ID_CHUNK]
        for request_id in chunk:
            if not issubclass(type(request_id), str):
                raise invalid("request_ids", request_id, "a string")
        yield [plain_text(request_id) for request_id in chunk]


def read_pause_scope(scope: object) -> PauseScope:
    """Return the scope of a pause. Raise UserError for any other value."""
    for known in PauseScope:
        if type(scope) in (str, PauseScope) and scope == known:
            return known
    raise UserError(f"scope={shorten(scope)} is not a valid pause scope; use 'all' or 'new'.")


def check_sleep_level(level: object) -> None:
    """Raise UserError unless `level` is 1 or 2."""
    if type(level) is not int or level not in (1, 2):
        raise UserError(f"level={shorten(level)} must be 1 or 2.")


def read_sleep_tags(tags: object) -> tuple[str, ...]:
    """Return the tags for `wake_up`. Raise UserError for other types or unknown tags."""
    if not isinstance(tags, (list, tuple, set, frozenset)) or not all(
        type(tag) is str and tag in SLEEP_TAGS for tag in tags
    ):
        raise UserError(
            f"tags={shorten(tags)} must be a list of these strings: "
            f"{', '.join(sorted(SLEEP_TAGS))}; an empty list stands for all."
        )
    return tuple(dict.fromkeys(tags))


def check_params_limits(params: SamplingParams, limits: LimitsConfig) -> None:
    """Raise RequestError if `stop`, `bad_words` or `extra_args` is larger than allowed."""
    for name, texts, count, chars in (
        ("stop", params.stop_strings, "max_stop_strings", "max_stop_chars"),
        ("bad_words", params.bad_words or (), "max_bad_words", "max_bad_word_chars"),
    ):
        maximum = getattr(limits, count)
        if len(texts) > maximum:
            raise RequestError(
                f"{name} has {len(texts)} strings; at most {maximum} are accepted ({count}).",
                parameter=name,
            )
        for text in texts:
            check_text(name, text, max_chars=getattr(limits, chars), limit=chars)
    num_chars = sum(map(len, params.bad_words or ()))
    if num_chars > limits.max_bad_words_chars:
        raise RequestError(
            f"the words in bad_words have {num_chars} characters; at most "
            f"{limits.max_bad_words_chars} are accepted (max_bad_words_chars).",
            parameter="bad_words",
        )
    if params.extra_args:
        plain_copy(
            "extra_args",
            params.extra_args,
            max_bytes=limits.max_extra_args_bytes,
            limit="max_extra_args_bytes",
        )


def _check_id(
    parameter: str, value: object, limits: LimitsConfig, *, more: int = 0, min_chars: int = 0
) -> str:
    maximum = limits.max_id_chars + more
    return check_text(
        parameter, value, max_chars=maximum, min_chars=min_chars, limit="max_id_chars"
    )


def check_encoder_inputs(inputs: object, num_prompt_tokens: int) -> None:
    """Raise RequestError unless all inputs lie within the prompt, in order, without overlap."""
    if not isinstance(inputs, tuple):
        raise RequestError(
            f"encoder_inputs={shorten(inputs)} must be a tuple of EncoderInput.",
            parameter="encoder_inputs",
        )
    end = 0
    for item in inputs:
        if (
            not isinstance(item, EncoderInput)
            or type(item.position) is not int
            or type(item.num_tokens) is not int
            or not isinstance(item.content_hash, bytes)
            or not item.content_hash
        ):
            raise RequestError(
                f"encoder_inputs contains {shorten(item)}; pass EncoderInput(position, num_tokens, "
                "content_hash) with a content_hash that is not empty.",
                parameter="encoder_inputs",
            )
        if item.num_tokens < 1 or item.position < end:
            raise RequestError(
                f"encoder_inputs has an input at tokens {item.position} to "
                f"{item.position + item.num_tokens - 1}. Inputs must be sorted, must not overlap "
                f"and must have at least one token; this one must start at token {end} or later.",
                parameter="encoder_inputs",
            )
        end = item.position + item.num_tokens
    if end > num_prompt_tokens:
        raise RequestError(
            f"encoder_inputs ends at token {end - 1}, but the prompt has only {num_prompt_tokens} "
            "tokens.",
            parameter="encoder_inputs",
        )


def _check_provided(parameter: str, capability: str, worker_provides: frozenset[str]) -> None:
    if capability not in worker_provides:
        raise RequestError(
            f"{parameter} is set, but the worker does not declare {capability!r} in `provides`. "
            f"Omit {parameter}, or choose another worker_cls.",
            parameter=parameter,
        )
