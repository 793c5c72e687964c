"""`dovetail bench latency` and `bench throughput` measure the speed of an engine."""

from __future__ import annotations

from collections.abc import Callable
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

_PROMPTS_HELP = "Number of concurrent requests."
_JSON_HELP = "Also write the measurements to this file, as JSON."

Bench = Annotated[BenchOptions, Parameter(name="*")]
JSONFile = Annotated[Path | None, Parameter(name="--json", help=_JSON_HELP, group=BENCH_GROUP)]
Engine = Annotated[EngineOptions, Parameter(name="*")]


def latency(*, bench: Bench = DEFAULT_BENCH, json: JSONFile = None, engine: Engine) -> int:
    """Measure one request at a time.

    The prompts are random tokens of fixed length. Sampling is greedy and ignores end-of-text
    tokens. No tokenizer is loaded.
    """
    return _bench("latency", {}, bench, json, engine, _latencies)


def throughput(
    *,
    num_prompts: Annotated[int, Parameter(help=_PROMPTS_HELP, group=BENCH_GROUP)] = 16,
    bench: Bench = DEFAULT_BENCH,
    json: JSONFile = None,
    engine: Engine,
) -> int:
    """Measure many concurrent requests.

    The prompts are random tokens of fixed length. Sampling is greedy and ignores end-of-text
    tokens. No tokenizer is loaded.
    """

    def measures(runs: list[Run]) -> dict[str, Summary]:
        return _throughputs(runs, bench, num_prompts)

    return _bench("throughput", {"num_prompts": num_prompts}, bench, json, engine, measures)


def _bench(
    command: str,
    case: dict[str, int],
    bench: BenchOptions,
    json: Path | None,
    engine: EngineOptions,
    measures: Callable[[list[Run]], dict[str, Summary]],
) -> int:
    """Run the workload, print the report, and write it to the file `json` unless that is None."""
    num_prompts = case.get("num_prompts", 1)
    check_workload(bench, num_prompts)
    args = replace(engine_args(engine), skip_tokenizer_init=True)
    from dovetail.engine.llm_engine import LLMEngine  # slow to import

    llm = LLMEngine.from_engine_args(args)
    try:
        with progress_note() as note:
            runs = measure(llm, bench, num_prompts, MonotonicClock(), note)
        report = Report(command=command, case={**case, **vars(bench)}, measures=measures(runs))
        print_report(report, llm)
        if json is not None:
            write_json(json, report, llm)
    finally:
        llm.shutdown()
    return 0


def _latencies(runs: list[Run]) -> dict[str, Summary]:
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


def _throughputs(runs: list[Run], bench: BenchOptions, num_prompts: int) -> dict[str, Summary]:
    def rate(unit: str, count: int) -> Summary:
        return summarize(unit, [count / run.total_s for run in runs])

    return {
        "output": rate("tokens/s", num_prompts * bench.output_len),
        "input": rate("tokens/s", num_prompts * bench.input_len),
        "requests": rate("requests/s", num_prompts),
        "whole run": summarize("s", [run.total_s for run in runs]),
        "first token": summarize("ms", [run.first_token_s * 1e3 for run in runs]),
    }
