"""Measure how long an engine takes to load a model in a new process, with its files in memory.

Method: each engine of `cpu_vs.py` that has the model runs in new processes, alternating with the
others; the first round, which fills caches, is not counted. `ready` is the time from the start of
the process to the loaded engine, `first token` until it has computed the first token of a prompt
of 32 tokens, and `weights` is the part of `ready` in which the model is created and its weights
are loaded, where the engine reports it. Dovetail runs three times: without the cache of packed
weights, with it, and with the weights quantized to 4 bits while loading. Python keeps its bytecode
in .bench/bytecode, as an installed package does.

    python bench/load_time.py [--model DIR] [--peers auto|a,b] [--peers-file FILE] [--rounds 5]
        [--max-ready-s 3.0] [--max-cached-s 2.0]

The exit code is 1 if the median of `ready` of Dovetail exceeds a limit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from cases import CASES
from peers.child import Child, ChildError
from peers.process_tree import peak_rss_mib
from peers.roster import OURS, Contender, find_contenders

LOAD_S, TOKEN_S = 300.0, 120.0
PROMPT = replace(CASES["decode1"], output_lens=(1,))
UNPACKED, CACHED, INT4 = "dovetail", "dovetail, packed cache", "dovetail, int4"


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of an engine: seconds until it is ready and until the first token, and memory.

    weights_s: seconds for the weights; None if the engine does not report them.
    """

    ready_s: float
    token_s: float
    weights_s: float | None
    peak_mib: float


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One way to start an engine. weights: its format of weights, "bf16" or "int4".

    cache: the directory of packed weights, which the first start fills; None if it has none.
    """

    title: str
    contender: Contender
    weights: str = "bf16"
    cache: Path | None = None


def start(engine: Engine, checkpoint: Path, threads: int) -> Start:
    """Start the engine in a new process, measure it, and terminate the process."""
    contender = engine.contender
    begin = time.perf_counter()
    child = Child(contender.python, contender.adapter, contender.env)
    try:
        loaded = child.ask(
            "load",
            LOAD_S,
            model=contender.model_for(checkpoint, engine.weights),
            weights=engine.weights,
            threads=threads,
            options=dict(contender.options),
        )
        ready = time.perf_counter()
        child.ask("generate", TOKEN_S, prompts=PROMPT.prompts, output_lens=[1])
        answered = time.perf_counter()
        if engine.cache is not None:
            _wait_for_file(engine.cache)
        return Start(
            ready_s=ready - begin,
            token_s=answered - begin,
            weights_s=loaded["weights_s"],
            peak_mib=peak_rss_mib(child.pid),
        )
    finally:
        child.close()


@contextmanager
def engines(arguments: argparse.Namespace, checkpoint: Path) -> Iterator[list[Engine]]:
    """Yield the engines. The caches of Dovetail are in a temporary directory."""
    contenders, absent = find_contenders(arguments.peers, arguments.peers_file, os.environ)
    for name, reason in absent.items():
        print(f"{name} does not take part: {reason}")
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": _folder("bytecode")}
    with tempfile.TemporaryDirectory(dir=_folder("")) as packed:
        chosen = []
        for contender in contenders:
            if not contender.model_for(checkpoint, "bf16"):
                continue
            env = {**contender.env, **bytecode}
            if contender.name != OURS:
                chosen.append(Engine(title=contender.name, contender=replace(contender, env=env)))
                continue
            for title, cache, weights in (
                (UNPACKED, "off", "bf16"),
                (CACHED, packed, "bf16"),
                (INT4, "off", "int4"),
            ):
                own = replace(contender, env={**env, "DOVETAIL_PACKED_CACHE": cache})
                folder = Path(packed) if cache == packed else None
                chosen.append(Engine(title=title, contender=own, weights=weights, cache=folder))
        yield chosen


def report(starts: dict[str, list[Start]]) -> None:
    """Print a table of medians, with the minimum and the maximum in brackets."""
    print(
        "| engine | ready, s | first token, s | weights, s | peak RSS, MiB |\n|---|---|---|---|---|"
    )
    for title, rows in starts.items():
        if not rows:
            continue
        weights = [row.weights_s for row in rows if row.weights_s is not None]
        cells = [
            _cell([row.ready_s for row in rows]),
            _cell([row.token_s for row in rows]),
            _cell(weights) if weights else "–",
            f"{max(row.peak_mib for row in rows):,.0f}",
        ]
        print(f"| {title} | {' | '.join(cells)} |")


def main() -> int:
    """Measure, print a table, and return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", help="a checkpoint; default: a Llama of 1.24 B parameters")
    parser.add_argument("--peers", default="auto", help="auto, or names separated by commas")
    parser.add_argument("--peers-file", help="TOML file with the locations of peers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--max-ready-s", type=float, default=3.0)
    parser.add_argument("--max-cached-s", type=float, default=2.0)
    arguments = parser.parse_args()
    checkpoint = _checkpoint(arguments.model)
    starts: dict[str, list[Start]] = {}
    with engines(arguments, checkpoint) as chosen:
        for number, engine in product(range(arguments.rounds + 1), chosen):
            rows = starts.setdefault(engine.title, [])
            row = start(engine, checkpoint, arguments.threads)
            if number:
                rows.append(row)
    report(starts)
    limits = {UNPACKED: arguments.max_ready_s, CACHED: arguments.max_cached_s}
    missed = False
    for title, limit in limits.items():
        median = statistics.median(row.ready_s for row in starts[title])
        print(f"{title}: ready after {median:.2f} s (limit {limit:g} s)")
        missed |= median > limit
    return int(missed)


def _wait_for_file(cache: Path) -> None:
    end = time.monotonic() + LOAD_S
    while not list(cache.glob("*.packed")):
        if time.monotonic() > end:
            raise TimeoutError("the packed weights were not written")
        time.sleep(0.1)


def _checkpoint(named: str | None) -> Path:
    if named:
        return Path(named).resolve()
    from checkpoints import make_checkpoint  # needs torch

    return make_checkpoint("llama-1b-shape", Path(".bench").resolve())


def _folder(name: str) -> str:
    path = Path(".bench").resolve() / name
    path.mkdir(parents=True, exist_ok=True)
    return str(path)


def _cell(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except (ChildError, OSError, ValueError) as error:
        raise SystemExit(f"load_time: {error}") from None
