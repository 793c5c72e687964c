"""Compare the throughput of embeddings on the CPU: Dovetail, OpenVINO and transformers.

Method. All engines load the same random checkpoint in the shape of BERT-base and compute the
normalized mean of the hidden states of the same texts, which are random token ids. They run
sequentially in each round, so that they share the machine's conditions. transformers in float32
computes what sentence-transformers computes by default. The results are medians of the rounds; a
ratio is the median of the ratios of each round. The vectors of all engines must be nearly parallel.

On a machine with other load only the CPU time can be compared, and only with one thread: threads
that wait for other threads also use CPU time. The table has the smallest CPU time of the rounds.

    python bench/embed_vs.py [--openvino-python PY] [--batch 64] [--length 128] [--rounds 5]
        [--precisions bf16,f32] [--threads 2]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from peers.child import Child, ChildError

LOAD_S, EMBED_S = 300.0, 120.0
FEWEST_SIMILAR = 0.99
"""Minimum cosine of the vectors of two engines for the same text."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """The result of an engine in a round. first: the vector of the first text."""

    seconds: float
    cpu_seconds: float
    first: list[float]


def make_bert(folder: Path) -> Path:
    """Return the directory of a random BERT-base. Write it if it does not exist."""
    path = folder / "bert-base-shape"
    if not (path / "model.safetensors").exists():
        import torch
        from transformers import BertConfig, BertModel

        torch.manual_seed(0)
        BertModel(BertConfig()).save_pretrained(path)
    return path


def main() -> int:
    """Measure and print a table for each precision."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--openvino-python", help="interpreter with optimum-intel")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precisions", default="bf16,f32")
    arguments = parser.parse_args()
    model = make_bert(Path(".bench").resolve())
    for precision in arguments.precisions.split(","):
        _report(precision, _race(arguments, model, precision), arguments)
    return 0


def _race(arguments: argparse.Namespace, model: Path, precision: str) -> dict[str, list[Round]]:
    """Return the results of each round, by engine."""
    pythons = {"dovetail": sys.executable, "transformers": sys.executable}
    if arguments.openvino_python:
        pythons["openvino"] = arguments.openvino_python
    source = random.Random(1)

    def texts() -> list[list[int]]:
        sizes = range(arguments.batch)
        return [[source.randrange(1000, 30000) for _ in range(arguments.length)] for _ in sizes]

    children = {name: Child(python, "peers.embedders") for name, python in pythons.items()}
    try:
        for name, child in children.items():
            child.ask(
                "load",
                LOAD_S,
                engine=name,
                model=str(model),
                precision=precision,
                threads=arguments.threads,
            )
            child.ask("embed", EMBED_S, prompts=texts())
        results: dict[str, list[Round]] = {name: [] for name in children}
        for _ in range(arguments.rounds):
            prompts = texts()
            for name, child in children.items():
                answer = child.ask("embed", EMBED_S, prompts=prompts)
                results[name].append(Round(**answer))
    finally:
        for child in children.values():
            child.close()
    return results


def _report(
    precision: str,
    results: dict[str, list[Round]],
    arguments: argparse.Namespace,
) -> None:
    ours = results["dovetail"]
    print(f"| {precision} | texts/s | Dovetail is faster by | CPU ms per text |\n|---|---|---|---|")
    for name, rounds in results.items():
        rate = arguments.batch / statistics.median(each.seconds for each in rounds)
        ratio = statistics.median(
            theirs.seconds / own.seconds for theirs, own in zip(rounds, ours, strict=True)
        )
        cpu_ms = 1000 * min(each.cpu_seconds for each in rounds) / arguments.batch
        print(f"| {name} | {rate:.1f} | {ratio:.2f} | {cpu_ms:.1f} |")
        for theirs, own in zip(rounds, ours, strict=True):
            cosine = sum(a * b for a, b in zip(theirs.first, own.first, strict=True))
            if cosine < FEWEST_SIMILAR:
                raise ValueError(f"the vectors of {name} and Dovetail differ: cosine {cosine:.4f}")


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except (ChildError, OSError, ValueError) as error:
        raise SystemExit(f"embed_vs: {error}") from None
