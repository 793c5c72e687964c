"""Compare the lab's simulator with the real engine, and write docs/lab/validation.md.

    python bench/lab_validation.py [--tiers T1,T2,T3,T4] [--threads 1] [--quick]

T1 repeats runs of the real engine with recorded step times; the decision logs must be equal. T2
compares the step times of a calibration with held-out steps. T3 compares latencies at three loads.
T4 compares which of two policies is better. T2 measures the calibration that T3 and T4 use, so
these need it. The models are the demo model and, for T2, random weights in the shape of a Llama
of 160 million parameters.

Results are stored after each tier (--results FILE); tiers that do not run keep their stored tables.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from checkpoints import make_checkpoint
from lab_tiers import latencies, policies, repeats, steps
from lab_tiers.tables import Table, make_setup

from dovetail_lab.real_engine.engine import RealEngine
from dovetail_lab.step_times.calibrated import CalibratedStepTimes
from dovetail_lab.step_times.calibration import Calibration
from dovetail_lab.step_times.machine_info import code_commit, this_machine

ROOT = Path(__file__).resolve().parents[1]
PAGE, STORE = ROOT / "docs" / "lab" / "validation.md", ROOT / ".bench" / "lab_validation.json"
TIERS = ("T1", "T2", "T3", "T4")
LARGE = "llama-160m"
BEGIN, END = "<!-- recorded: {} -->", "<!-- end -->"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of the measurements. policies: number of policies for T1; 0 for all."""

    policies: int = 0
    passes: int = 5
    held_out: int = 40
    requests: int = 150
    repeats: int = 4
    seeds: int = 5
    paired_requests: int = 100


QUICK = Sizes(policies=1, passes=2, held_out=6, requests=16, repeats=2, seeds=2, paired_requests=12)


def measure(
    tiers: Iterable[str], sizes: Sizes, num_threads: int, *, large: bool
) -> Mapping[str, Table]:
    """Run tiers. large: whether T2 also measures the large model."""
    tables = {}
    if "T1" in tiers:
        tables["T1"] = repeats.run_repeats(_log, sizes.policies)
    if not {"T2", "T3", "T4"} & set(tiers):
        return tables
    tables["T2"] = steps.new_table()
    with RealEngine("demo", make_setup(), {"num_threads": num_threads}) as engine:
        calibration = _measure_steps(engine, "demo", tables["T2"], sizes, num_threads)
        step_times = CalibratedStepTimes(calibration)
        if "T3" in tiers:
            tables["T3"] = latencies.new_table()
            latencies.run_latencies(
                engine,
                "demo",
                step_times,
                tables["T3"],
                _log,
                num_requests=sizes.requests,
                num_repeats=sizes.repeats,
            )
        if "T4" in tiers:
            tables["T4"] = policies.new_table()
            policies.run_policies(
                engine,
                "demo",
                step_times,
                tables["T4"],
                _log,
                num_requests=sizes.paired_requests,
                num_seeds=sizes.seeds,
            )
    if large and "T2" in tiers:
        model = str(make_checkpoint(LARGE, ROOT / ".bench"))
        with RealEngine(model, make_setup(), {"num_threads": num_threads}) as engine:
            few = replace(sizes, passes=2, held_out=16)
            _measure_steps(engine, model, tables["T2"], few, num_threads)
    return tables


def _measure_steps(
    engine: RealEngine, model: str, table: Table, sizes: Sizes, num_threads: int
) -> Calibration:
    return steps.run_steps(
        engine,
        model,
        table,
        _log,
        num_passes=sizes.passes,
        num_requests=sizes.held_out,
        num_threads=num_threads,
    )


def page_with(page: str, stored: Mapping[str, Any]) -> str:
    """Return the page with the stored tables between its marks."""
    for tier, table in stored.items():
        begin = BEGIN.format(tier)
        head, _, rest = page.partition(begin)
        _, _, tail = rest.partition(END)
        page = "\n".join([head + begin, *_lines(table), END]) + tail
    return page


def _lines(table: Mapping[str, Any]) -> Iterable[str]:
    yield f"| {' | '.join(table['columns'])} |"
    yield "|---" * len(table["columns"]) + "|"
    for row in table["rows"]:
        yield f"| {' | '.join(row)} |"
    yield ""
    low, high = (f"{value:.1f}" for value in table["load"])
    threads = table["num_threads"]
    yield f"**{table['passed']:,} of {table['judged']:,} passed.** {table['machine']},"
    yield f"{threads} thread{'s' * (threads > 1)} for the model, {table['created']}, commit"
    yield f"{table['commit']}; load average {low} at the start and {high} at the end."


def main(arguments: list[str] | None = None) -> int:
    """Run the tiers and write the page. Return 1 if a limit was exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiers", default=",".join(TIERS))
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the real engine")
    parser.add_argument("--quick", action="store_true", help="few runs; no large model, no page")
    parser.add_argument("--results", type=Path, default=STORE)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    tiers = options.tiers.split(",")
    if unknown := set(tiers) - set(TIERS):
        parser.error(f"unknown tiers: {', '.join(sorted(unknown))}")
    sizes, full = (QUICK, False) if options.quick else (Sizes(), True)
    tables = measure(tiers, sizes, options.threads, large=full)
    about = {
        "commit": code_commit(),
        "created": datetime.now(UTC).date().isoformat(),
        "machine": this_machine().describe(),
        "num_threads": options.threads,
    }
    stored = json.loads(options.results.read_text()) if options.results.is_file() else {}
    stored |= {tier: {**table.plain(), **about} for tier, table in tables.items()}
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(stored, indent=1))
    if full:
        options.page.write_text(page_with(options.page.read_text("utf-8"), stored), "utf-8")
    for tier in tables:
        print("\n".join([tier, *_lines(stored[tier])]))
    return int(any(table.passed < table.judged for table in tables.values()))


def _log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
