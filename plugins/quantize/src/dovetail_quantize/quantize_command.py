"""`dovetail quantize`: quantize a model with calibration data."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from dovetail.cli.plugins_table import print_line, print_table
from dovetail_quantize.quantize_options import DEFAULTS, QuantizeOptions, check_options

if TYPE_CHECKING:
    from dovetail_quantize.quantizing import Quantized

_MODEL_HELP = "A model directory, a GGUF file, or a name for a model source."


def quantize(
    model: Annotated[str, Parameter(help=_MODEL_HELP)],
    /,
    *,
    options: Annotated[QuantizeOptions, Parameter(name="*")] = DEFAULTS,
) -> int:
    """Quantize a model, write it as a directory with a GGUF file, and print its accuracy."""
    check_options(options)
    from dovetail_quantize.run import run  # slow to import

    result = run(model, options, lambda text: print(text, file=sys.stderr, flush=True))
    if options.report:
        _print_layers(result.quantized)
    _print_kept(result.quantized, options.max_layer_error)
    _print_unused(result.quantized)
    rows = [
        (name, f"{item.perplexity:.4g}", f"{item.kl:.5f}", f"{100 * item.same_best:.2f} %")
        for name, item in (("before", result.before), ("after", result.after))
    ]
    print_table(("", "perplexity", "KL, nats", "same most likely token"), rows)
    text = options.evaluate or "built-in"
    print_line(f"Evaluation text: {text}, {result.num_positions} positions.")
    bits = result.quantized.bits_per_weight
    print_line(f"Linear layers: {bits:.2f} bits per weight; head and embedding: {result.head}.")
    print_line(f"Saved to {result.output}: {result.num_bytes / 1e6:.1f} MB.")
    return 0


def _print_layers(quantized: Quantized) -> None:
    rows = [
        (
            name.removeprefix("model.").removesuffix(".weight"),
            part.type_name,
            f"{part.error or 0:.4f}",
            _note(part.first_error),
        )
        for name, part in quantized.parts.items()
    ]
    print_table(("layer", "type", "relative output error", ""), rows)


def _note(first_error: float | None) -> str:
    return "" if first_error is None else f"kept at 8 bits ({first_error:.4f} before)"


def _print_kept(quantized: Quantized, max_layer_error: float) -> None:
    kept = [part for part in quantized.parts.values() if part.first_error is not None]
    if kept:
        print_line(
            f"{len(kept)} of {len(quantized.parts)} layers are kept at 8 bits, because their "
            f"relative output error is above {max_layer_error:g}."
        )


def _print_unused(quantized: Quantized) -> None:
    """Print the experts that the calibration text does not use, by layer."""
    unused = {
        name.removeprefix("model.").removesuffix(".gate_proj.weight"): part.unused
        for name, part in quantized.parts.items()
        if part.unused and name.endswith(".gate_proj.weight")
    }
    if not unused:
        return
    count = sum(map(len, unused.values()))
    print_line(
        f"{count} experts received no tokens of the calibration text and are rounded to nearest; "
        "a longer or more varied text may use them:"
    )
    for name, experts in unused.items():
        print_line(f"  {name}: {', '.join(map(str, experts))}")
