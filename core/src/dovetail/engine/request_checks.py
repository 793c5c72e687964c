"""Checks of a request that need the model's sizes, shared by front end and engine.

Pure and cheap: no tokenizer, no state. The front end checks to explain early; the engine checks
again, since it does not know what front end a request came through.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from dovetail.errors import RequestError
from dovetail.interfaces.sampling_support import missing_capability
from dovetail.request import EncoderInput, EngineCoreRequest
from dovetail.sampling_params import SamplingParams

SHOWN_CHARS = 80


def check_token_ids(parameter: str, token_ids: Iterable[object], vocab_size: int) -> None:
    """Raise RequestError naming `parameter` unless all are integers from 0 to vocab_size - 1."""
    known_ints = isinstance(token_ids, array) and token_ids.typecode in "bBhHiIlLqQ"
    ids = token_ids if isinstance(token_ids, (Sequence, frozenset)) else tuple(token_ids)
    if not ids:
        return
    if not known_ints and set(map(type, ids)) != {int}:
        wrong = next(token for token in ids if type(token) is not int)
        raise RequestError(
            f"{parameter} holds {_shown(wrong)}, which is no integer; give token ids.",
            parameter=parameter,
        )
    for wrong in (min(ids), max(ids)):
        if not 0 <= wrong < vocab_size:
            raise RequestError(
                f"{parameter} holds token id {wrong}, but the model's vocabulary has ids from 0 "
                f"to {vocab_size - 1}.",
                parameter=parameter,
            )


def check_prompt(token_ids: Sequence[int], *, vocab_size: int, max_model_len: int) -> None:
    """Raise RequestError if the prompt is empty, too long for one new token, or out of range."""
    if not isinstance(token_ids, Sequence) and not isinstance(token_ids, array):
        raise RequestError(
            f"the prompt's tokens are a {type(token_ids).__name__}; give a sequence of token ids.",
            parameter="prompt",
        )
    if not token_ids:
        raise RequestError(
            "the prompt is empty: give at least one token or character.", parameter="prompt"
        )
    if len(token_ids) > max_model_len - 1:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens, but at most {max_model_len - 1} fit: "
            f"max_model_len={max_model_len} must leave room for one more. Shorten the prompt, or "
            f"set truncate_prompt_tokens={max_model_len - 1}.",
            parameter="prompt",
        )
    check_token_ids("prompt", token_ids, vocab_size)


def check_sampling_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError if a token id in `params` is outside the vocabulary."""
    for name, ids in (
        ("logit_bias", params.logit_bias),
        ("allowed_token_ids", params.allowed_token_ids),
        ("stop_token_ids", params.stop_token_ids),
    ):
        check_token_ids(name, tuple(ids or ()), vocab_size)


def check_sampling_support(params: SamplingParams, worker_provides: frozenset[str]) -> None:
    """Raise RequestError for the first field of `params` that the worker does not implement."""
    missing = missing_capability(params, worker_provides)
    if missing is None:
        return
    name, capability = missing
    raise RequestError(
        f"{name}={_shown(getattr(params, name))} needs a worker with the capability "
        f"{capability!r}, and this one does not declare it. Leave {name} out, or choose a "
        f"worker_cls that has {capability!r} in `provides`.",
        parameter=name,
    )


def validate_core_request(
    request: EngineCoreRequest,
    *,
    vocab_size: int,
    max_model_len: int,
    worker_provides: frozenset[str] = frozenset(),
) -> None:
    """Check a request as the engine receives it; raise RequestError naming the parameter.

    vocab_size: the width of the logits. worker_provides: the worker's capability ids. Changes
    nothing.
    """
    if not isinstance(request.request_id, str) or not request.request_id:
        raise RequestError(
            f"request_id={_shown(request.request_id)} must be a string of at least one character.",
            parameter="request_id",
        )
    if not isinstance(request.sampling_params, SamplingParams):
        raise RequestError("sampling_params must be SamplingParams.", parameter="sampling_params")
    check_prompt(request.prompt_token_ids, vocab_size=vocab_size, max_model_len=max_model_len)
    _check_integer("max_tokens", request.max_tokens, 1, 2**31 - 1)
    _check_integer("seed", request.seed, 0, 2**64 - 1)
    _check_integer("arrival_ns", request.arrival_ns, 0, 2**63 - 1)
    _check_integer("deadline_ns", request.deadline_ns, 0, 2**63 - 1)
    check_place(priority=request.priority, cache_salt=request.cache_salt)
    _check_string("tenant", request.tenant)
    _check_string("lora_id", request.lora_id)
    if request.lora_id:
        _check_provided("lora_id", "lora", worker_provides)
    if request.encoder_inputs:
        _check_provided("encoder_inputs", "encoder", worker_provides)
        check_encoder_inputs(request.encoder_inputs, len(request.prompt_token_ids))
    request.sampling_params.validate()
    check_sampling_support(request.sampling_params, worker_provides)
    check_sampling_tokens(request.sampling_params, vocab_size)
    check_token_ids("stop_token_ids", request.stop_token_ids, vocab_size)
    for word in request.bad_words_token_ids:
        if not word:
            raise RequestError("bad_words holds a word without tokens.", parameter="bad_words")
        check_token_ids("bad_words", word, vocab_size)


def check_place(*, priority: object, cache_salt: object) -> None:
    """Raise RequestError unless they are an integer of 64 bits and a string."""
    _check_integer("priority", priority, -(2**63), 2**63 - 1)
    _check_string("cache_salt", cache_salt)


def check_encoder_inputs(inputs: object, num_prompt_tokens: int) -> None:
    """Raise RequestError unless all stand within the prompt, in order, none over another."""
    if not isinstance(inputs, tuple):
        raise RequestError(
            f"encoder_inputs={_shown(inputs)} must be a tuple of EncoderInput.",
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
                f"encoder_inputs holds {_shown(item)}; give EncoderInput(position, num_tokens, "
                "content_hash), the hash not empty.",
                parameter="encoder_inputs",
            )
        if item.num_tokens < 1 or item.position < end:
            raise RequestError(
                f"encoder_inputs has tokens {item.position} to "
                f"{item.position + item.num_tokens - 1}; each needs a token of its own, in order, "
                f"from token {end} on.",
                parameter="encoder_inputs",
            )
        end = item.position + item.num_tokens
    if end > num_prompt_tokens:
        raise RequestError(
            f"encoder_inputs reach to token {end - 1}, but the prompt has {num_prompt_tokens}.",
            parameter="encoder_inputs",
        )


def _check_provided(parameter: str, capability: str, worker_provides: frozenset[str]) -> None:
    if capability not in worker_provides:
        raise RequestError(
            f"{parameter} is given, but the worker does not provide {capability!r}; leave it out, "
            "or choose a worker_cls that does.",
            parameter=parameter,
        )


def _check_string(parameter: str, value: object) -> None:
    if not isinstance(value, str):
        raise RequestError(f"{parameter}={_shown(value)} must be a string.", parameter=parameter)


def _check_integer(parameter: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise RequestError(
            f"{parameter}={_shown(value)} must be an integer from {low} to {high}.",
            parameter=parameter,
        )


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= SHOWN_CHARS else shown[: SHOWN_CHARS - 3] + "..."
