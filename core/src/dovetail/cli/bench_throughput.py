"""`dovetail bench throughput`: how many tokens a second pass when many ask at once."""

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

_PROMPTS_HELP = "Requests that are asked at once."
_JSON_HELP = "Write the measurements to this file, too."


def throughput(
    *,
    num_prompts: Annotated[int, Parameter(help=_PROMPTS_HELP, group=BENCH_GROUP)] = 16,
    bench: Annotated[BenchOptions, Parameter(name="*")] = DEFAULT_BENCH,
    json: Annotated[Path | None, Parameter(help=_JSON_HELP, group=BENCH_GROUP)] = None,
    engine: Annotated[EngineOptions, Parameter(name="*")],
) -> int:
    """Measure many requests at once.

    Random prompts of fixed length, greedy, past the end of the text; no tokenizer is loaded.
    """
    check_workload(bench, num_prompts)
    args = replace(engine_args(engine), skip_tokenizer_init=True)
    llm = LLMEngine.from_engine_args(args)
    try:
        with progress_note() as note:
            runs = measure(llm, bench, num_prompts, MonotonicClock(), note)
        case = {"num_prompts": num_prompts, **vars(bench)}
        report = Report(
            command="throughput", case=case, measures=_measures(runs, bench, num_prompts)
        )
        print_report(report, llm)
        if json is not None:
            write_json(json, report, llm)
    finally:
        llm.shutdown()
    return 0


def _measures(runs: list[Run], bench: BenchOptions, num_prompts: int) -> dict[str, Summary]:
    def rate(unit: str, count: int) -> Summary:
        return summarize(unit, [count / run.total_s for run in runs])

    return {
        "output": rate("tokens/s", num_prompts * bench.output_len),
        "input": rate("tokens/s", num_prompts * bench.input_len),
        "requests": rate("requests/s", num_prompts),
        "whole run": summarize("s", [run.total_s for run in runs]),
        "first token": summarize("ms", [run.first_token_s * 1e3 for run in runs]),
    }
