"""Compares the computation with a GGUF file's own blocks with llama.cpp, position by position.

Four rows per file: Dovetail and llama.cpp, each with the blocks of the file and with the
dequantized weights in float32. Perplexities are compared in pairs of equal positions; ± is the
standard error of the mean of the differences. The most likely tokens are compared at positions
where the two largest logits of the reference differ by more than each of `MARGINS`.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quality.job import JobError, run_separately, run_tool
from quality.report import table

MARGINS = (0.0, 0.1, 0.5)
DEADLINE_S = 3600.0
FLOAT32, BLOCKS = "Dovetail, float32", "Dovetail, blocks"
PEER_FLOAT32, PEER_BLOCKS = "llama.cpp, float32", "llama.cpp, blocks"
JSON_NAME = "fidelity.json"

Texts = Mapping[str, Mapping[str, Sequence[float]]]
"""The values that `PositionRecorder` recorded, by text."""


def measure(
    source: Path, chunks: Mapping[str, Any], pythons: Mapping[str, str], threads: int
) -> tuple[dict[str, Texts], dict[str, str]]:
    """Return the metrics of each row, and the reason for each row that is absent."""
    measured: dict[str, Texts] = {}
    absent: dict[str, str] = {}
    job = {"threads": threads, "chunks": chunks, "positions": True}
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, "float32.gguf")
        rows: Sequence[tuple[str, str, Path, dict[str, str]]] = (
            (FLOAT32, "dovetail", source, {"dtype": "float32"}),
            (BLOCKS, "dovetail", source, {"dtype": "bfloat16"}),
            (PEER_FLOAT32, "llamacpp", plain, {}),
            (PEER_BLOCKS, "llamacpp", source, {}),
        )
        for name, engine, model, options in rows:
            try:
                python = _python(pythons, engine)
                _dequantize(python, source, model)
                row = {**job, "engine": engine, "model": str(model), "options": options}
                measured[name] = run_separately(python, row, DEADLINE_S)["texts"]
            except JobError as error:
                absent[name] = str(error)
    return measured, absent


def _dequantize(python: str, source: Path, model: Path) -> None:
    """Write a file with the weights in float32, unless the model is the file itself."""
    if model != source:
        module = "quality.convert_llamacpp"
        run_tool([python, "-m", module, "--float32", str(source), str(model)], DEADLINE_S)


def _python(pythons: Mapping[str, str], engine: str) -> str:
    if engine not in pythons:
        raise JobError(f"no Python interpreter for {engine} was given")
    return pythons[engine]


def compare(row: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """Return the relative change of perplexity, its standard error, and the top-1 agreement.

    Raises ValueError if the numbers of positions differ.
    """
    if len(row["nll"]) != len(reference["nll"]):
        raise ValueError(f"{len(row['nll'])} and {len(reference['nll'])} positions")
    difference_P = np.subtract(row["nll"], reference["nll"])
    margin_P = np.array(reference["margin"])
    same_P = np.equal(row["best"], reference["best"])
    return {
        "change": math.expm1(difference_P.mean()),
        "error": float(difference_P.std() / math.sqrt(len(difference_P))),
        "same_best": {str(least): float(same_P[margin_P > least].mean()) for least in MARGINS},
    }


def summary(measured: Mapping[str, Texts]) -> dict[str, Any]:
    """Return perplexities and comparisons by row and text."""
    result: dict[str, Any] = {}
    for name, texts in measured.items():
        result[name] = {
            text: {
                "num_positions": len(figures["nll"]),
                "perplexity": math.exp(np.mean(figures["nll"])),
                "against": {
                    other: compare(figures, measured[other][text])
                    for other in measured
                    if other != name
                },
            }
            for text, figures in texts.items()
        }
    return result


def document(result: Mapping[str, Any]) -> str:
    """Return the tables of a result of `write`."""
    origin = result["origin"]
    parts = [f"`{origin['command']}`, commit {origin['commit']}, {origin['date']}."]
    head = ["", "perplexity", *(f"change against {other}" for other in result["rows"])]
    head += [f"same best token as {PEER_BLOCKS}, margin > {least}" for least in MARGINS]
    for text in origin["settings"]["texts"]:
        lines = []
        for name, texts in result["rows"].items():
            figures = texts[text]
            against = figures["against"]
            cells = [
                f"{100 * against[other]['change']:+.2f} ± {100 * against[other]['error']:.2f} %"
                if other in against
                else ""
                for other in result["rows"]
            ]
            peer = against.get(PEER_BLOCKS)
            cells += [f"{peer['same_best'][str(m)]:.2%}" if peer else "" for m in MARGINS]
            lines.append([name, f"{figures['perplexity']:.4f}", *cells])
        count = next(iter(result["rows"].values()))[text]["num_positions"]
        parts += [f"## {text.capitalize()}, {count:,} positions", table(head, lines)]
    if result["absent"]:
        parts.append("\n".join(f"- {name}: {why}" for name, why in result["absent"].items()))
    return "\n\n".join(parts) + "\n"


def write(result: Mapping[str, Any], folder: Path) -> str:
    """Write fidelity.json and fidelity.md. Return the tables."""
    text = document(result)
    content = json.dumps(result, indent=1, allow_nan=False) + "\n"
    (folder / JSON_NAME).write_text(content, encoding="utf-8")
    (folder / "fidelity.md").write_text(text, encoding="utf-8")
    return text
