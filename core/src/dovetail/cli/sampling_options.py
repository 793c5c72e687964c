"""Sampling parameters as command-line flags and as `name=value` settings.

Parameters that are not set have the values of the model's generation config. `SamplingParams`
checks bounds. The engine option `--seed` sets the seed.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from cyclopts import Group, Parameter

from dovetail.errors import RequestError, nearest
from dovetail.sampling_params import SamplingParams

SAMPLING_GROUP = Group("Sampling options", sort_key=1)

SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "truncate_prompt_tokens",
)
"""The fields of `SamplingParams` that `with_settings` may change."""


def _option(text: str) -> Parameter:
    return Parameter(help=text, group=SAMPLING_GROUP, negative="", show_default=False)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Sampling flags. None means the default of the model."""

    max_tokens: Annotated[int | None, _option("Maximum number of tokens in an output.")] = None
    temperature: Annotated[
        float | None, _option("Sampling temperature; 0: always the most likely token.")
    ] = None
    top_p: Annotated[
        float | None, _option("Cumulative probability of the candidate tokens (nucleus sampling).")
    ] = None
    top_k: Annotated[int | None, _option("Number of candidate tokens; 0: all.")] = None
    min_p: Annotated[
        float | None, _option("Minimum probability, relative to the most likely token.")
    ] = None
    repetition_penalty: Annotated[
        float | None, _option("Repetition penalty; values above 1 reduce repetitions.")
    ] = None
    stop: Annotated[
        tuple[str, ...] | None,
        _option("A string that ends the output; may be repeated."),
    ] = None
    ignore_eos: Annotated[bool, _option("Continue after the end-of-sequence token.")] = False
    truncate_prompt_tokens: Annotated[
        int | None, _option("Keep only this many tokens from the end of a longer prompt.")
    ] = None

    def apply_to(self, params: SamplingParams, *, max_tokens: int) -> SamplingParams:
        """Return `params` with these options.

        max_tokens: the value if the `max_tokens` option is not set. Raises RequestError with the
        parameter, its value and its bounds.
        """
        return replace(params, **{"max_tokens": max_tokens, **self._values()})

    def check(self) -> None:
        """Raise RequestError for an invalid option, before a model is loaded."""
        replace(SamplingParams(), **self._values())

    def given(self) -> dict[str, Any]:
        """Return the options that were set."""
        return {name: value for name, value in self._values().items() if value is not False}

    def _values(self) -> dict[str, Any]:
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


NO_OVERRIDES = SamplingOptions()


def named_settings(text: str) -> list[str]:
    """Return the names in a string of settings, in order. Raises the errors of `with_settings`."""
    return [name for name, _ in _settings(text)]


def with_settings(params: SamplingParams, text: str) -> SamplingParams:
    """Return `params` with settings such as "temperature=0.2 max_tokens=100 stop='END'".

    Words are split as in a shell. Values are parsed as JSON if possible, and otherwise as text
    with the escapes of JSON strings; "none" is None.
    Raises RequestError, with a message of one line, for an invalid setting or value.
    """
    return replace(params, **dict(_settings(text)))


def _settings(text: str) -> list[tuple[str, Any]]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise RequestError(f"The settings {text!r} cannot be split: {error}.") from None
    return [_setting(word) for word in words]


def _setting(word: str) -> tuple[str, Any]:
    name, equals, text = word.partition("=")
    if name not in SETTINGS:
        raise RequestError(f"{name!r} is not a parameter.{nearest(name, SETTINGS)}")
    if not equals:
        raise RequestError(f"{name!r} needs a value: {name}=…", parameter=name)
    if text.lower() == "none":
        return name, None
    for spelling in (text, f'"{text}"'):
        try:
            return name, json.loads(spelling)
        except (ValueError, RecursionError):
            continue
    return name, text
