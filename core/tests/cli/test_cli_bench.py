"""`dovetail bench`: its requests, its report, and the shared benchmark cases."""

from __future__ import annotations

import json
import sys
from importlib import util
from pathlib import Path

import pytest

from dovetail import LLMEngine
from dovetail.cli import main
from dovetail.cli.bench_report import summarize
from dovetail.cli.bench_workload import Run

CASES_FILE = Path(__file__).parents[3] / "bench" / "cases.py"


@pytest.fixture
def requested(monkeypatch) -> list[tuple[tuple[int, ...], object]]:
    """Return a list that receives (prompt, params) of every request."""
    seen = []
    add_request = LLMEngine.add_request

    def spy(self, request_id, prompt, params, **options):
        seen.append((tuple(prompt["prompt_token_ids"]), params))
        return add_request(self, request_id, prompt, params, **options)

    monkeypatch.setattr(LLMEngine, "add_request", spy)
    return seen


def bench(command: str, options: list[str], *more: str, input_len: int = 9) -> list[str]:
    lengths = ["--input-len", str(input_len), "--output-len", "5"]
    return ["bench", command, *options, *lengths, *more]


def test_the_latency_benchmark_runs_one_request_at_a_time(
    spell, requested, tmp_path, capsys
) -> None:
    file = tmp_path / "out.json"
    arguments = bench("latency", spell(), "--repeats", "3", "--warmup", "2", "--json", str(file))
    assert main(arguments) == 0
    assert len(requested) == 5
    assert all(len(prompt) == 9 for prompt, _ in requested)
    assert len({prompt for prompt, _ in requested}) == 5
    assert all(p.greedy and p.ignore_eos and p.max_tokens == 5 for _, p in requested)
    output = json.loads(file.read_text())
    assert output["case"] == {"input_len": 9, "output_len": 5, "warmup": 2, "repeats": 3}
    measures = output["measures"]
    assert set(measures) == {"time_to_first_token", "whole_request", "between_tokens", "decode"}
    for actual in measures.values():
        assert len(actual["values"]) == 3
        assert 0 < actual["min"] <= actual["median"] <= actual["max"]
    assert measures["time_to_first_token"]["max"] <= measures["whole_request"]["max"]
    shown = capsys.readouterr().out
    for words in ("time to first token", "median", "IQR", "ms", "scheduler fcfs"):
        assert words in shown


def test_the_report_names_the_selected_platform(spell, tmp_path, capsys, monkeypatch) -> None:
    """The report does not name a platform that was only probed."""
    file = tmp_path / "out.json"
    options = spell()
    index = options.index("--platform")
    del options[index : index + 2]
    command = bench("latency", options, "--repeats", "1", "--warmup", "0", "--json", str(file))
    assert main(command) == 0
    assert "platform cpu," in capsys.readouterr().out
    plugins = json.loads(file.read_text())["engine"]["plugins"]
    assert [plugin["name"] for plugin in plugins if plugin["kind"] == "platform"] == ["cpu"]


def test_the_throughput_benchmark_submits_all_requests_together(spell, requested, tmp_path) -> None:
    file = tmp_path / "out.json"
    more = ("--num-prompts", "4", "--repeats", "2", "--warmup", "0", "--json", str(file))
    assert main(bench("throughput", spell(), *more)) == 0
    assert len({prompt for prompt, _ in requested}) == 8
    output = json.loads(file.read_text())
    measures = output["measures"]
    for index in range(2):
        seconds = measures["whole_run"]["values"][index]
        assert measures["output"]["values"][index] == pytest.approx(4 * 5 / seconds)
        assert measures["input"]["values"][index] == pytest.approx(4 * 9 / seconds)
    kinds = {actual["kind"]: actual["name"] for actual in output["engine"]["plugins"]}
    assert (kinds["scheduler"], kinds["worker"]) == ("fcfs", "BigramWorker")


def test_benchmark_prompts_are_determined_by_the_seed(spell, requested) -> None:
    options = spell()
    for seed in ("1", "1", "2"):
        assert main(bench("latency", options, "--repeats", "1", "--seed", seed)) == 0
    prompts = [prompt for prompt, _ in requested]
    assert prompts[0:2] == prompts[2:4] != prompts[4:6]


def test_a_benchmark_with_one_output_token_has_no_inter_token_latency(spell, capsys) -> None:
    assert main(["bench", "latency", *spell(), "--output-len", "1", "--repeats", "1"]) == 0
    output = capsys.readouterr().out
    assert "time to first token" in output and "between tokens" not in output


@pytest.mark.costly
@pytest.mark.parametrize(
    ("command", "arguments", "output"),
    [
        ("latency", ["--repeats", "0"], "--repeats 0"),
        ("latency", ["--warmup", "-1"], "--warmup"),
        ("throughput", ["--num-prompts", "0"], "--num-prompts 0"),
        ("throughput", ["--num-prompt", "3"], "--num-prompts"),
        ("throughput", ["--json", "/no/such/folder/x"], "/no/such/folder/x"),
    ],
)
def test_invalid_arguments_are_reported(spell, capsys, command, arguments, output) -> None:
    assert main(bench(command, spell(length=64), *arguments)) == 2
    captured = capsys.readouterr().err
    assert output in captured and len(captured.splitlines()) <= 3


def test_requests_that_exceed_the_engines_limits_are_rejected(spell, requested, capsys) -> None:
    assert main(bench("latency", spell(length=64), input_len=60)) == 2
    assert "65 tokens" in capsys.readouterr().err
    assert requested == []


def test_the_benchmark_summary_contains_median_and_spread() -> None:
    actual = summarize("s", [4.0, 1.0, 2.0, 3.0, 100.0])
    assert (actual.median, actual.min, actual.max, actual.iqr) == (3.0, 1.0, 100.0, 2.0)
    assert summarize("s", [5.0]).iqr == 0.0


def test_benchmark_times_are_measured_from_the_start_of_a_benchmark_run() -> None:
    run = Run(start_ns=1_000_000_000, token_times_ns=(1_500_000_000, 4_000_000_000))
    assert (run.first_token_s, run.total_s) == (0.5, 3.0)


def test_the_sizes_of_the_shared_benchmark_cases_are_unchanged(monkeypatch) -> None:
    spec = util.spec_from_file_location("bench_cases", CASES_FILE)
    module = util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_cases", module)
    spec.loader.exec_module(module)
    sizes = {
        name: (len(case.prompts), sum(map(len, case.prompts)), sum(case.output_lens))
        for name, case in module.CASES.items()
    }
    assert sizes == {
        "decode1": (1, 32, 128),
        "conc16": (16, 2048, 1024),
        "varied64": (64, 7208, 4766),
        "prefill1024": (1, 1024, 1),
    }
    case = module.CASES["conc16"]
    assert case.prompts == case.prompts_of(0) != case.prompts_of(1)
