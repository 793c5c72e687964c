"""Sampling parameters from the fields of a request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from dovetail.errors import RequestError
from dovetail.sampling_params import SamplingParams
from dovetail_server.protocol.errors import APIError, api_error
from dovetail_server.protocol.fields import ChatRequest, CompletionRequest, GenerationFields
from dovetail_server.protocol.grammars import grammar_field, read_grammar

COPIED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "max_tokens",
    "min_tokens",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
    "truncate_prompt_tokens",
)
"""Fields that `SamplingParams` has under the same name."""

PARAMETER_NAMES: Mapping[str, str] = {
    "tenant": "user",
    "deadline_s": "X-First-Token-Timeout",
    "timeout_s": "X-Request-Timeout",
}
"""Map of a parameter to the request's field, if their names differ."""

DEFAULT_COMPLETION_TOKENS = 16
TOKEN_ID = re.compile("-?(0|[1-9][0-9]*)")
"""A key of a JSON object that msgspec reads as an integer. SamplingParams checks the range."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The sampling parameters for the prompts of a request.

    params: the parameters; the `num_returned` best of its `n` completions are returned. names: the
    fields of the request by parameter, for errors. without_output: whether the caller requests no
    generated token.
    """

    params: SamplingParams
    num_returned: int
    names: Mapping[str, str]
    without_output: bool = False


def completion_sampling(request: CompletionRequest, defaults: SamplingParams) -> Sampling:
    """Return the sampling of /v1/completions. Raise APIError that names an invalid field."""
    values = _common_values(request)
    without_output = bool(request.echo) and request.max_tokens == 0
    if without_output:
        values["max_tokens"] = 1
    elif request.max_tokens is None:
        values["max_tokens"] = DEFAULT_COMPLETION_TOKENS
    if request.logprobs is not None:
        values["logprobs"] = request.logprobs
        if request.echo and request.prompt_logprobs is None:
            values["prompt_logprobs"] = request.logprobs
    return _sampling(request, values, defaults, PARAMETER_NAMES, without_output=without_output)


def chat_sampling(request: ChatRequest, defaults: SamplingParams) -> Sampling:
    """Return the sampling of /v1/chat/completions. Raise APIError that names an invalid field."""
    values = _common_values(request)
    names = {**PARAMETER_NAMES, "prompt": "messages"}
    if request.max_completion_tokens is not None:
        if request.max_tokens not in (None, request.max_completion_tokens):
            raise APIError(
                f"max_tokens={request.max_tokens} conflicts with max_completion_tokens="
                f"{request.max_completion_tokens}; omit max_tokens.",
                code="contradictory_parameters",
                param="max_tokens",
            )
        names["max_tokens"] = "max_completion_tokens"
        values["max_tokens"] = request.max_completion_tokens
    elif request.max_tokens is None:
        values["max_tokens"] = None
    if request.logprobs:
        names["logprobs"] = "top_logprobs"
        values["logprobs"] = request.top_logprobs or 0
    elif request.top_logprobs:
        raise APIError(
            "top_logprobs needs logprobs=true.",
            code="contradictory_parameters",
            param="top_logprobs",
        )
    return _sampling(request, values, defaults, names)


def _common_values(request: GenerationFields) -> dict[str, Any]:
    values = {name: value for name in COPIED if (value := getattr(request, name)) is not None}
    if request.logit_bias is not None:
        values["logit_bias"] = _biases(request.logit_bias)
    if (grammar := read_grammar(request)) is not None:
        values["structured_outputs"] = grammar
    if request.stream_options is not None and not request.stream:
        raise APIError(
            "stream_options needs stream=true.",
            code="contradictory_parameters",
            param="stream_options",
        )
    return values


def _sampling(
    request: GenerationFields,
    values: dict[str, Any],
    defaults: SamplingParams,
    names: Mapping[str, str],
    *,
    without_output: bool = False,
) -> Sampling:
    num_returned = 1 if request.n is None else request.n
    if field := grammar_field(request):
        names = {**names, "structured_outputs": field, "structured_outputs.form": field}
    values["n"] = num_returned
    if request.best_of is not None and request.best_of != num_returned:
        _check_best_of(request.best_of, num_returned, streamed=bool(request.stream))
        values["n"] = request.best_of
        values.setdefault("logprobs", 0)  # the completions are ordered by their sum
        names = {**names, "n": "best_of"}
    try:
        params = replace(defaults, **values)
    except RequestError as error:
        raise api_error(error, names) from None
    return Sampling(
        params=params, num_returned=num_returned, names=names, without_output=without_output
    )


def _check_best_of(best_of: int, n: int, *, streamed: bool) -> None:
    if streamed:
        raise APIError(
            f"best_of={best_of} cannot be streamed; omit best_of or stream.",
            code="contradictory_parameters",
            param="best_of",
        )
    if best_of < n:
        raise APIError(
            f"best_of={best_of} must be at least n={n}.",
            code="contradictory_parameters",
            param="best_of",
        )


def _biases(mapping: Mapping[str, float]) -> dict[int, float]:
    # msgspec converts the keys in a third of the time of a loop, which blocks the event loop less.
    try:
        return msgspec.convert(mapping, dict[int, float], str_keys=True)
    except msgspec.ValidationError:
        not_ids = (token for token in mapping if not TOKEN_ID.fullmatch(token))
        invalid = next(not_ids, max(mapping, key=len))  # an integer can have too many digits
        raise APIError(
            f"logit_bias has the key {invalid[:40]!r}; keys must be token ids.", param="logit_bias"
        ) from None
