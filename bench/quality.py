"""Measure the accuracy of formats on real weights and compare it with other engines, in one run.

The script measures perplexity, KL divergence and top-1 agreement at every position of chunks of
1,024 tokens, compared with Dovetail's float32 and bf16 on the same weights. Weights: a GGUF file
(default: smollm2), dequantized to bf16 ("published"); and the same weights with noise, so that no
format can recover the quantization of the file (`off_grid`, used to compare formats). Each format
runs in a separate process, with the settings of its speed benchmark. The script also measures the
errors of single layers of all-MiniLM-L6-v2, if its directory is given.

    python bench/quality.py [--quick] [--model FILE.gguf] [--minilm DIR] [--out DIR] [--keep]

Other engines need interpreters: --llamacpp-python and --openvino-python, or the variables
DOVETAIL_PEER_LLAMACPP_PYTHON and DOVETAIL_PEER_OPENVINO_PYTHON (see peers/README.md). An engine
that is absent or fails is reported. Results: DIR/quality.md, quality.json and, with matplotlib,
quality.png; they are written after each format. `--keep` continues an earlier run of the same
settings: formats with results in DIR are not measured again.

    python bench/quality.py --fidelity [--model FILE.gguf] [--llamacpp-python PYTHON]

compares the computation with the blocks of the file with llama.cpp and with float32, position by
position, and writes DIR/fidelity.md and fidelity.json (`quality/fidelity.py`).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quality import fidelity, results
from quality.formats import EVERY, FLOAT32, OFF_GRID, REFERENCES, WEIGHTS, Format
from quality.references import SEED
from quality.run import CHUNK_TOKENS, Run, measure_layers, measure_weights, read_chunks
from quality.texts import EVALUATION, FIDELITY

QUICK_FORMATS = (FLOAT32, "bf16", "int8", "int4", "q4_k")
HERE = Path(__file__).resolve().parent


def _origin(run: Run, num_chunks: int) -> dict[str, Any]:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    return {
        "command": shlex.join(["python", "bench/quality.py", *sys.argv[1:]]),
        "commit": done.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "settings": {
            "model": run.source.name,
            "sha256": hashlib.sha256(run.source.read_bytes()).hexdigest(),
            "chunks": num_chunks,
            "chunk_tokens": CHUNK_TOKENS,
            "threads": run.threads,
            "seed": SEED,
            "texts": run.texts,
        },
    }


def _find_source(arguments: str) -> Path:
    from dovetail.config.model_sources import find_model
    from dovetail.plugins import PluginRegistry

    return find_model(arguments, PluginRegistry()) or Path(arguments).absolute()


def _pythons(args: argparse.Namespace) -> dict[str, str]:
    result = {"dovetail": sys.executable, "torch": sys.executable}
    for name in ("llamacpp", "openvino"):
        variable = f"DOVETAIL_PEER_{name.upper()}_PYTHON"
        python = getattr(args, f"{name}_python") or os.environ.get(variable)
        if python:
            result[name] = str(Path(python).absolute())
    return result


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="one chunk, noisy weights, own formats"
    )
    parser.add_argument("--model", default="smollm2", help="a GGUF file or a model's name")
    parser.add_argument("--minilm", type=Path, help="directory of all-MiniLM-L6-v2")
    parser.add_argument("--fidelity", action="store_true", help="compare one file in two engines")
    parser.add_argument("--chunks", type=int, help="maximum chunks per text (default: 4, or 12)")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--formats", nargs="+", help="names of formats (default: all)")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--llamacpp-python")
    parser.add_argument("--openvino-python")
    parser.add_argument(
        "--keep", action="store_true", help="do not measure the formats in --out again"
    )
    parser.add_argument("--out", type=Path, default=HERE.parent / ".bench" / "quality")
    args = parser.parse_args()
    args.chunks = args.chunks or (12 if args.fidelity else 4)
    if not 1 <= args.chunks <= 64:
        parser.error("--chunks must be between 1 and 64")
    if args.quick:
        args.chunks, args.weights = 1, [OFF_GRID]
    return args


def _chosen(args: argparse.Namespace) -> list[Format]:
    names = args.formats or (QUICK_FORMATS if args.quick else None)
    if names is None:
        return list(EVERY)
    unknown = sorted(set(names) - {item.name for item in EVERY})
    if unknown:
        raise SystemExit(
            f"unknown formats {unknown}; choose from {[entry.name for entry in EVERY]}"
        )
    return [item for item in EVERY if item.name in names or item.name in REFERENCES]


def _compared(run: Run) -> str:
    """Write and return the comparison of Dovetail and llama.cpp on the published file."""
    rows, absent = fidelity.measure(run.source, run.chunks, run.pythons, run.threads)
    absent = {**run.absent, **absent}
    result = {"origin": run.origin, "rows": fidelity.summary(rows), "absent": absent}
    return fidelity.write(result, run.out)


def main() -> None:
    """Measure and write the results."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # deletes intermediate files
    args = _arguments()
    formats = _chosen(args)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        run = Run(
            folder=Path(folder),
            out=args.out,
            source=_find_source(args.model),
            pythons=_pythons(args),
            threads=args.threads,
        )
        read_chunks(run, args.chunks, FIDELITY if args.fidelity else EVALUATION)
        if not run.chunks:
            reasons = "\n".join(f"{name}: {reason}" for name, reason in run.absent.items())
            raise SystemExit(f"no text can be read:\n{reasons}")
        run.origin = _origin(run, args.chunks)
        if args.fidelity:
            print(_compared(run))
            return
        if args.keep:
            kept = results.earlier(args.out, run.origin["settings"])
            run.rows, run.layers = kept.rows, kept.layers
        measure_layers(run, args.minilm)
        for weights in args.weights:
            measure_weights(run, weights, formats)
        print(run.write())


if __name__ == "__main__":
    try:
        main()
    except results.ResultsError as error:
        raise SystemExit(f"quality: {error}") from None
