"""The options of `dovetail quantize`. Imported with the command: no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dovetail.errors import ConfigError, nearest

METHODS = ("rtn", "gptq", "awq")
FORMATS = {
    "int4": ("Q4_0",),
    "q4_1": ("Q4_1",),
    "q4_k": ("Q4_K", "Q5_0"),
    "q6_k": ("Q6_K", "Q8_0"),
    "int8": ("Q8_0",),
}
"""Block types by format. The second is used if rows are not a multiple of the first's blocks."""
HEADS: dict[str, tuple[str, ...]] = {
    "q8_0": ("Q8_0",),
    "q6_k": ("Q6_K", "Q8_0"),
    "q4_0": ("Q4_0",),
    "bfloat16": (),
}
"""Block types of the head and the token embedding by the name of the option."""
_MIN_TOKENS, _MAX_TOKENS = 256, 1 << 20


def _option(text: str) -> Parameter:
    return Parameter(help=text)


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """The options. `check_options` checks the values."""

    method: Annotated[str, _option("rtn (round to nearest), gptq or awq.")] = "rtn"
    format: Annotated[str, _option("int4, q4_1, q4_k, q6_k or int8.")] = "q4_k"
    calibrate: Annotated[
        Path | None, _option("A text file for calibration; gptq and awq need it.")
    ] = None
    evaluate: Annotated[
        Path | None,
        _option("A held-out text file for perplexity and KL divergence (default: built-in)."),
    ] = None
    out: Annotated[
        Path | None,
        Parameter(
            name=("--out", "--output"),
            help="The new directory (default: MODEL-FORMAT in the current directory).",
        ),
    ] = None
    report: Annotated[
        bool, Parameter(negative="", help="Print the relative output error of each layer.")
    ] = False
    head: Annotated[
        str, _option("Output head and token embedding: q8_0, q6_k, q4_0 or bfloat16.")
    ] = "q8_0"
    max_layer_error: Annotated[
        float, _option("Layers with a greater relative output error are kept at 8 bits.")
    ] = 0.2
    damping: Annotated[
        float,
        _option("For gptq: amount added to the diagonal of the moments, relative to its mean."),
    ] = 0.01
    max_tokens: Annotated[int, _option("Maximum number of calibration tokens.")] = 8192


DEFAULTS = QuantizeOptions()


def check_options(options: QuantizeOptions) -> None:
    """Raise ConfigError, naming the option, for an invalid value or an ineffective option."""
    _check_choice("--method", options.method, METHODS)
    _check_choice("--format", options.format, FORMATS)
    _check_choice("--head", options.head, HEADS)
    if options.method != "rtn" and options.calibrate is None:
        raise ConfigError(f"--method={options.method} needs --calibrate with a text file.")
    if options.report and options.calibrate is None:
        raise ConfigError("--report needs --calibrate with a text file.")
    if not _MIN_TOKENS <= options.max_tokens <= _MAX_TOKENS:
        raise ConfigError(f"--max-tokens must be between {_MIN_TOKENS} and {_MAX_TOKENS}.")
    if not 0 < options.damping <= 1:
        raise ConfigError("--damping must be greater than 0 and at most 1.")
    if not options.max_layer_error >= 0:
        raise ConfigError("--max-layer-error must be at least 0.")
    _check_effects(options)


def _check_effects(options: QuantizeOptions) -> None:
    """Raise ConfigError for an option that has no effect in combination with the others."""
    if options.method != "gptq" and options.damping != DEFAULTS.damping:
        raise ConfigError("--damping has no effect without --method=gptq.")
    is_default = options.max_layer_error == DEFAULTS.max_layer_error
    if FORMATS[options.format] == ("Q8_0",) and not is_default:
        raise ConfigError(
            f"--max-layer-error has no effect with --format={options.format}: all layers have 8 "
            "bits."
        )
    for name in ("max_layer_error", "max_tokens"):
        if options.calibrate is None and getattr(options, name) != getattr(DEFAULTS, name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} has no effect without --calibrate.")


def _check_choice(option: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise ConfigError(
            f"{option}={value:.80} is not known.{nearest(value[:80], choices)}\n"
            f"Choices: {', '.join(choices)}."
        )
