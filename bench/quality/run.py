"""Measures formats and layers one after another, and writes the results after each of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quality import results
from quality.conversion import model_path
from quality.formats import EVERY, OFF_GRID, REFERENCES, WEIGHTS, Format
from quality.job import JobError, run_separately
from quality.layers import format_names, layer_errors
from quality.references import write_reference
from quality.texts import EVALUATION, Text, TextError

CHUNK_TOKENS = 1024
DEADLINE_S = 1800.0


@dataclass(kw_only=True)
class Run:
    """One run. folder: directory for intermediate files. out: directory for results.

    texts: the sources of the texts that are used. absent: reasons by name. origin: command, commit
    and date, as they were at the start, and the settings.
    """

    folder: Path
    out: Path
    source: Path
    pythons: Mapping[str, str]
    threads: int
    chunks: dict[str, list[list[int]]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    layers: dict[str, dict[str, float]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    origin: dict[str, Any] = field(default_factory=dict)

    def add(self, row: dict[str, Any]) -> None:
        """Add a row, which replaces an earlier row of the same format. Write the results."""
        key = (row["weights"], row["format"])
        self.rows = [old for old in self.rows if (old["weights"], old["format"]) != key]
        self.rows.append(row)
        self.write()

    def write(self) -> str:
        """Write the results so far. Return the document."""
        names = [item.name for item in EVERY]
        self.rows.sort(key=lambda row: (WEIGHTS.index(row["weights"]), names.index(row["format"])))
        rows = results.complete(self.rows)
        result = {"origin": self.origin, "rows": rows, "layers": self.layers, "absent": self.absent}
        return results.write(result, self.out)


def read_chunks(run: Run, num_chunks: int, texts: Sequence[Text] = EVALUATION) -> None:
    """Tokenize texts with the tokenizer of the GGUF file."""
    from dovetail_gguf.tokenizer import GGUFTokenizer

    tokenizer = GGUFTokenizer.from_directory(run.source)
    run.chunks, absent = read_texts(tokenizer, texts, num_chunks)
    run.absent |= absent
    run.texts = {text.domain: text.sources for text in texts if text.domain in run.chunks}


def read_texts(
    tokenizer: Any, texts: Sequence[Text], num_chunks: int
) -> tuple[dict[str, list[list[int]]], dict[str, str]]:
    """Return the chunks of each text, and the reason for each text that is absent."""
    chunks_by_text, absent = {}, {}
    for text in texts:
        try:
            ids = list(tokenizer.encode(text.excerpt(), add_special_tokens=False))
        except TextError as error:
            absent[text.domain] = str(error)
            continue
        starts = range(0, min(len(ids), num_chunks * CHUNK_TOKENS), CHUNK_TOKENS)
        chunks = [ids[start : start + CHUNK_TOKENS] for start in starts]
        chunks_by_text[text.domain] = [chunk for chunk in chunks if len(chunk) == CHUNK_TOKENS]
    return chunks_by_text, absent


def measure_weights(run: Run, weights: str, formats: Sequence[Format]) -> None:
    """Add a row for each format on one kind of weights. Dovetail's references come first.

    Formats of an earlier run are kept. The references are measured again for the missing formats.
    """
    usable = [item for item in formats if item.is_for(weights)]
    missing = [item for item in usable if not results.finished(run.rows, weights, item)]
    if not missing:
        return
    name = weights.replace(" ", "-")
    directory = write_reference(run.source, run.folder / name, off_grid=weights == OFF_GRID)
    num_weights = _num_weights(directory)
    known: dict[str, str] = {}
    for item in usable:
        is_reference = item.name in REFERENCES
        if item not in missing and not is_reference:
            continue
        logits = str(run.folder / f"{name}-logits-{item.name}") if is_reference else None
        job = {
            "engine": item.engine,
            "options": item.options,
            "threads": run.threads,
            "chunks": run.chunks,
            "references": known,
            "save_to": logits,
            "num_weights": num_weights,
        }
        _add_row(run, item, weights, directory, job)
        if logits is not None:
            known = {**known, item.name: logits}


def _add_row(
    run: Run, first: Format, weights: str, directory: Path, job: Mapping[str, Any]
) -> None:
    began = time.monotonic()
    try:
        python = run.pythons.get(first.engine)
        if python is None:
            raise JobError(f"no Python interpreter for {first.engine} was given")
        model = model_path(first, run.source, directory, python)
        actual = run_separately(python, {**job, "model": str(model)}, DEADLINE_S)
    except JobError as error:
        if first.name in REFERENCES:
            raise SystemExit(f"the reference {first.name} failed: {error}") from None
        run.absent[f"{first.name}, {weights}"] = str(error)
        return
    took = time.monotonic() - began
    key = {"weights": weights, "format": first.name, "engine": first.engine}
    origin = {"definition": results.definition(first), "commit": run.origin["commit"]}
    run.add({**key, **origin, "seconds": round(took), **actual})
    print(f"{weights}: {first.name}: {took:.0f} s", file=sys.stderr, flush=True)


def measure_layers(run: Run, minilm: Path | None) -> None:
    """Add the errors of single layers, unless an earlier run has them."""
    if minilm is None:
        run.absent["layers"] = "--minilm was not given"
        return
    llamacpp = run.pythons.get("llamacpp")
    if list(run.layers.get("mean", ())) == format_names(llamacpp is not None):
        return
    try:
        run.layers = layer_errors(minilm, llamacpp)
    except JobError as error:
        run.absent["layers"] = str(error)
    run.write()


def _num_weights(directory: Path) -> int:
    from safetensors import safe_open

    with safe_open(directory / "model.safetensors", "np") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    return sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
