"""Compare Dovetail with other engines on the CPU: same checkpoints, same cases, in one run.

Method: every engine runs in a separate process (and optionally a separate environment), is loaded
once per weight format, and alternates with the other engines in each round of the cases
(`peers/race.py`). Requests are greedy, ignore EOS, have exact numbers of tokens and new prompts
each time (`cases.py`). Around each repetition, probes measure the machine's read bandwidth and GEMM
rates (`peers/probe.py`), which give a limit for the case (`peers/limits.py`). Repetitions that
other processes disturbed are marked and measured again. The script prints medians with their
spread, Dovetail's ratio to the best other engine, and its share of the limit (`peers/tables.py`).

`startup` is the time from the start of a process to its first token; in `hog`, another process
keeps one core busy. Other engines ("peers") are optional: `peers/README.md` describes their set-up.
A peer that fails or hangs is reported, and the run continues.

    python bench/cpu_vs.py [--model DIR …] [--peers auto|a,b] [--peers-file FILE]
        [--formats bf16,int8,int4] [--cases decode1,conc16,varied64,prefill1024,startup,hog]
        [--threads 2] [--rounds 3] [--attempts 2] [--one-at-a-time]
        [--json FILE] [--write-docs FILE] [--quality FILE]
    python bench/cpu_vs.py --results FILE … --write-docs docs/performance.md

`--model FILE.gguf` compares Dovetail and llama.cpp with the blocks of the same file.
`--quality` names the JSON file of `bench/quality.py`. Then the tables show the KL divergence of
each format, and a second ratio uses only engines that are accurate enough (`peers/accuracy.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from peers.accuracy import read_accuracy
from peers.child import ChildError
from peers.machine_facts import machine_facts
from peers.measures import MEASURES, START_UP
from peers.page import http_section, performance_page
from peers.race import ProbeError, Race, RacePlan
from peers.roster import FORMATS, GGUF_FILE, OURS, find_contenders
from peers.tables import markdown
from quality.results import ResultsError

CASES = (*MEASURES, START_UP)


def main() -> int:
    """Measure or read results. Print the tables and write the requested files."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    arguments = _parser().parse_args()
    accuracy = read_accuracy(Path(arguments.quality)) if arguments.quality else None
    if arguments.results:
        runs = [json.loads(Path(file).read_text("utf-8")) for file in arguments.results]
    else:
        runs = [_race(arguments)]
    for run in runs:
        for result in run["results"]:
            print(markdown(result, accuracy))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(runs[0], indent=1), encoding="utf-8")
    if arguments.write_docs:
        page = performance_page(runs, arguments.note, accuracy)
        target = Path(arguments.write_docs)
        kept = http_section(target.read_text(encoding="utf-8")) if target.exists() else ""
        target.write_text(page + kept, encoding="utf-8")
    reasons = [f for run in runs for result in run["results"] for f in result["failures"]]
    return int(any(failure["engine"] == OURS for failure in reasons))


def _race(arguments: argparse.Namespace) -> dict[str, Any]:
    contenders, absent = find_contenders(arguments.peers, arguments.peers_file, os.environ)
    for name, reason in absent.items():
        _report(f"{name} does not take part: {reason}")
    if not contenders:
        raise ValueError("no engine is selected")
    results: list[dict[str, Any]] = []
    for checkpoint in _checkpoints(arguments.model):
        race = Race(_plan(arguments, checkpoint), contenders, _report)
        try:
            race.run()
        except KeyboardInterrupt:
            _report("interrupted: the results so far follow")
            break
        finally:
            race.close()
            results.append(race.result())
    return {"machine": machine_facts(), "absent": absent, "results": results}


def _plan(arguments: argparse.Namespace, checkpoint: Path) -> RacePlan:
    return RacePlan(
        checkpoint=checkpoint,
        formats=(GGUF_FILE,) if checkpoint.is_file() else arguments.formats,
        cases=arguments.cases,
        threads=arguments.threads,
        rounds=arguments.rounds,
        deadline_s=arguments.deadline,
        load_deadline_s=arguments.load_deadline,
        attempts=arguments.attempts,
        one_at_a_time=arguments.one_at_a_time,
    )


def _checkpoints(named: list[str]) -> list[Path]:
    if named:
        return [Path(name).resolve() for name in named]
    from checkpoints import (
        SHAPES,
        make_checkpoint,
    )  # needs torch, so imported only if a checkpoint is created

    return [make_checkpoint(name, Path(".bench").resolve()) for name in SHAPES]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--model", nargs="+", default=[], help="directories or GGUF files; default: created here"
    )
    parser.add_argument("--peers", default="auto", help="auto, or names separated by commas")
    parser.add_argument("--peers-file", help="TOML file with the locations of peers")
    parser.add_argument("--formats", type=_some_of(FORMATS), default=FORMATS)
    parser.add_argument("--cases", type=_some_of(CASES), default=CASES)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--attempts", type=int, default=2, help="maximum attempts for a disturbed repetition"
    )
    parser.add_argument("--deadline", type=float, default=180, help="seconds for one request")
    parser.add_argument("--load-deadline", type=float, default=300, help="seconds for loading")
    parser.add_argument(
        "--one-at-a-time",
        action="store_true",
        help="keep only one engine in memory, which is slower",
    )
    parser.add_argument("--json", help="also write the result to this file")
    parser.add_argument("--results", nargs="+", help="read these files instead of measuring")
    parser.add_argument("--write-docs", help="write the page of docs/performance.md to this file")
    parser.add_argument("--quality", help="JSON file of quality.py, for equal accuracy")
    parser.add_argument("--note", default="", help="a sentence for the top of that page")
    return parser


def _some_of(allowed: tuple[str, ...]) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        unknown = sorted(set(chosen) - set(allowed))
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {unknown}; choose from {list(allowed)}")
        return chosen

    return parse


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except (ChildError, ProbeError, ResultsError, OSError, ValueError) as error:
        raise SystemExit(f"cpu_vs: {error}") from None
