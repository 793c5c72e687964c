"""`dovetail bench latency`: how long one request takes when nobody else asks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dovetail.cli.bench_report import Report, Summary, print_report, summarize, write_json
from dovetail.cli.bench_workload import (
    BENCH_GROUP,
    DEFAULT_BENCH,
    BenchOptions,
    Run,
    check_workload,
    measure,
)
from dovetail.cli.engine_options import EngineOptions, engine_args
from dovetail.cli.terminal import progress_note
from dovetail.clock import MonotonicClock
from dovetail.engine.llm_engine import LLMEngine

_JSON_HELP = "Write the measurements to this file, too."


def latency(
    *,
    bench: Annotated[BenchOptions, Parameter(name="*")] = DEFAULT_BENCH,
    json: Annotated[Path | None, Parameter(help=_JSON_HELP, group=BENCH_GROUP)] = None,
    engine: Annotated[EngineOptions, Parameter(name="*")],
) -> int:
    """Measure one request at a time.

    Random prompts of fixed length, greedy, past the end of the text; no tokenizer is loaded.
    """
    check_workload(bench, 1)
    args = replace(engine_args(engine), skip_tokenizer_init=True)
    llm = LLMEngine.from_engine_args(args)
    try:
        with progress_note() as note:
            runs = measure(llm, bench, 1, MonotonicClock(), note)
        report = Report(command="latency", case=vars(bench), measures=_measures(runs))
        print_report(report, llm)
        if json is not None:
            write_json(json, report, llm)
    finally:
        llm.shutdown()
    return 0


def _measures(runs: list[Run]) -> dict[str, Summary]:
    measures = {
        "time to first token": summarize("ms", [run.first_token_s * 1e3 for run in runs]),
        "whole request": summarize("ms", [run.total_s * 1e3 for run in runs]),
    }
    gaps = [run for run in runs if len(run.token_times_ns) > 1]
    if gaps:
        means = [(run.total_s - run.first_token_s) / (len(run.token_times_ns) - 1) for run in gaps]
        measures["between tokens"] = summarize("ms", [mean * 1e3 for mean in means])
        measures["decode"] = summarize("tokens/s", [1 / mean for mean in means])
    return measures
