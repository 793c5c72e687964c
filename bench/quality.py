"""Measure the accuracy of formats on real weights and compare it with other engines, in one run.

Measures perplexity, KL divergence and the share of equal best tokens at every position of chunks of
1,024 tokens, compared with Dovetail's float32 and bf16 on the same weights. Weights: a GGUF file
(default: smollm2), dequantized to bf16 ("published"); and the same weights with noise, so that no
format can recover the quantization of the file ("off grid", used to compare formats). Each format
runs in a separate process, with the settings of its speed benchmark. Also the errors of single
layers of all-MiniLM-L6-v2, if its directory is given.

    python bench/quality.py [--quick] [--model FILE.gguf] [--minilm DIR] [--out DIR]

Peers need interpreters: --llamacpp-python and --openvino-python, or the variables
DOVETAIL_PEER_LLAMACPP_PYTHON and DOVETAIL_PEER_OPENVINO_PYTHON (see peers/README.md). A peer that
is absent or fails is reported. Results: DIR/quality.md, quality.json and, with matplotlib,
quality.png.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quality.conversion import model_paths
from quality.formats import (
    FLOAT32,
    OFF_GRID,
    OURS,
    PEERS,
    REFERENCES,
    SOURCE_FILE,
    WEIGHTS,
    Format,
)
from quality.job import JobError, run_apart
from quality.layers import layer_errors
from quality.references import write_reference
from quality.report import plot, tables
from quality.texts import EVALUATION, TextError

CHUNK_TOKENS = 1024
DEADLINE_S = 1800.0
QUICK_FORMATS = (FLOAT32, "bf16", "int8", "int4", "int4, head int8")
HERE = Path(__file__).resolve().parent


@dataclass(kw_only=True)
class Run:
    """One run. texts: the sources of the texts that are used. absent: reasons by name.

    origin: command, commit and date, as they were at the start.
    """

    folder: Path
    source: Path
    pythons: Mapping[str, str]
    threads: int
    chunks: dict[str, list[list[int]]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)


def read_chunks(run: Run, num_chunks: int) -> None:
    """Tokenize the texts with the tokenizer of the GGUF file."""
    from dovetail_gguf.tokenizer import GGUFTokenizer

    tokenizer = GGUFTokenizer.from_directory(run.source)
    for text in EVALUATION:
        try:
            ids = list(tokenizer.encode(text.excerpt(), add_special_tokens=False))
        except TextError as error:
            run.absent[text.domain] = str(error)
            continue
        starts = range(0, min(len(ids), num_chunks * CHUNK_TOKENS), CHUNK_TOKENS)
        chunks = [ids[start : start + CHUNK_TOKENS] for start in starts]
        run.chunks[text.domain] = [chunk for chunk in chunks if len(chunk) == CHUNK_TOKENS]
        run.texts[text.domain] = text.sources


def measure_weights(run: Run, weights: str, formats: Sequence[Format]) -> None:
    """Add a row for each format on one kind of weights; Dovetail's references come first."""
    name = weights.replace(" ", "-")
    directory = write_reference(run.source, run.folder / name, off_grid=weights == OFF_GRID)
    usable = [one for one in formats if weights != OFF_GRID or one.model != SOURCE_FILE]
    paths, absent = model_paths(run.source, directory, usable, run.pythons)
    run.absent |= {f"{key}, {weights}": why for key, why in absent.items()}
    num_weights = _num_weights(directory)
    known: dict[str, str] = {}
    for one in usable:
        if one.name not in paths:
            continue
        is_reference = one.name in REFERENCES
        logits = str(run.folder / f"{name}-logits-{one.name}") if is_reference else None
        job = {
            "engine": one.engine,
            "model": paths[one.name],
            "options": one.options,
            "threads": run.threads,
            "chunks": run.chunks,
            "references": known,
            "save_to": logits,
            "num_weights": num_weights,
        }
        _add_row(run, one, weights, job)
        if logits is not None:
            known = {**known, one.name: logits}


def _add_row(run: Run, one: Format, weights: str, job: Mapping[str, Any]) -> None:
    began = time.monotonic()
    try:
        found = run_apart(run.pythons[one.engine], job, DEADLINE_S)
    except JobError as error:
        if one.name in REFERENCES:
            raise SystemExit(f"the reference {one.name} failed: {error}") from None
        run.absent[f"{one.name}, {weights}"] = str(error)
        return
    row = {"weights": weights, "format": one.name, "engine": one.engine, **found}
    run.rows.append(row)
    took = time.monotonic() - began
    print(f"{weights}: {one.name}: {took:.0f} s", file=sys.stderr, flush=True)


def fill_references(rows: Sequence[dict[str, Any]]) -> None:
    """Complete the rows of the references, which were measured before others existed.

    A reference equals itself, and the divergence between the two is known in one direction only.
    """
    for row in rows:
        if row["format"] not in REFERENCES:
            continue
        for text in row["texts"].values():
            for reference in REFERENCES:
                is_same = reference == row["format"]
                text["kl"].setdefault(reference, 0.0 if is_same else float("nan"))
                text["same_best"].setdefault(reference, 1.0 if is_same else float("nan"))


def _num_weights(directory: Path) -> int:
    from safetensors import safe_open

    with safe_open(directory / "model.safetensors", "np") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    return sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)


def _origin() -> dict[str, str]:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    return {
        "command": shlex.join(["python", "bench/quality.py", *sys.argv[1:]]),
        "commit": done.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _find_source(given: str) -> Path:
    from dovetail.config.model_sources import find_model
    from dovetail.plugins import PluginRegistry

    return find_model(given, PluginRegistry()) or Path(given).absolute()


def _pythons(args: argparse.Namespace) -> dict[str, str]:
    found = {"dovetail": sys.executable, "torch": sys.executable}
    for name in ("llamacpp", "openvino"):
        variable = f"DOVETAIL_PEER_{name.upper()}_PYTHON"
        python = getattr(args, f"{name}_python") or os.environ.get(variable)
        if python:
            found[name] = str(Path(python).absolute())
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one chunk, off grid, own formats")
    parser.add_argument("--model", default="smollm2", help="a GGUF file or a model's name")
    parser.add_argument("--minilm", type=Path, help="directory of all-MiniLM-L6-v2")
    parser.add_argument("--chunks", type=int, default=4, help="chunks per text")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--formats", nargs="+", help="names of formats (default: all)")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--llamacpp-python")
    parser.add_argument("--openvino-python")
    parser.add_argument("--out", type=Path, default=HERE.parent / ".bench" / "quality")
    args = parser.parse_args()
    if not 1 <= args.chunks <= 64:
        parser.error("--chunks must be from 1 to 64")
    if args.quick:
        args.chunks, args.weights = 1, [OFF_GRID]
    return args


def _chosen(args: argparse.Namespace) -> list[Format]:
    names = args.formats or (QUICK_FORMATS if args.quick else None)
    every = [*OURS, *PEERS]
    if names is None:
        return every
    unknown = sorted(set(names) - {one.name for one in every})
    if unknown:
        raise SystemExit(f"unknown formats {unknown}; there are {[one.name for one in every]}")
    return [one for one in every if one.name in names or one.name in REFERENCES]


def write_results(run: Run, args: argparse.Namespace) -> None:
    """Write the table, the JSON file and the plot."""
    fill_references(run.rows)
    origin = {
        **run.origin,
        "model": run.source.name,
        "chunks": args.chunks,
        "chunk_tokens": CHUNK_TOKENS,
        "texts": run.texts,
    }
    layers = layer_errors(args.minilm) if args.minilm else {}
    if not args.minilm:
        run.absent["layers"] = "--minilm was not given"
    if importlib.util.find_spec("matplotlib") is None:
        run.absent["plot"] = "matplotlib is not installed"
    result = {"origin": origin, "rows": run.rows, "layers": layers, "absent": run.absent}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "quality.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    document = tables(result)
    (args.out / "quality.md").write_text(document, encoding="utf-8")
    if "plot" not in run.absent:
        plot(result, args.out / "quality.png")
    print(document)


def main() -> None:
    """Measure and write the results."""
    args = _arguments()
    formats = _chosen(args)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        run = Run(
            folder=Path(folder),
            source=_find_source(args.model),
            pythons=_pythons(args),
            threads=args.threads,
            origin=_origin(),
        )
        read_chunks(run, args.chunks)
        if not run.chunks:
            raise SystemExit(f"no text can be read: {run.absent}")
        for weights in args.weights:
            measure_weights(run, weights, formats)
        write_results(run, args)


if __name__ == "__main__":
    main()
