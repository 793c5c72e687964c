"""Invalid traces, loads, policies and files at the command line: the error names the cause."""

import csv

import pytest

from dovetail.cli import main

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:15:{:02}.0000000,{},{}\n"
GOOD = "".join(ROW.format(second, 100, 10) for second in range(40))
MOONCAKE = '{{"timestamp": {}, "input_length": 5, "output_length": 5, "hash_ids": [1]}}\n'
SMALL = ["--requests", "30", "--seeds", "1", "--load", "0.5", "--jobs", "2"]
LONG = "x" * 300
POLICIES = """
import time

from dovetail.interfaces import Policy

class Raises(Policy):
    def rank(self, request, view):
        if request.sequence == 20:
            raise ValueError("request 20 has no rank")
        return request.sequence

class Hangs(Policy):
    def rank(self, request, view):
        while request.sequence == 20:
            time.sleep(0.1)
        return request.sequence

class Acts(Policy):
    def plan(self, view):
        yield ("grant", 5)

class Incomparable(Policy):
    def rank(self, request, view):
        return object()

class Mine(Policy):
    def rank(self, request, view):
        return -request.sequence
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the current directory, which contains ./bad.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(POLICIES)
    return tmp_path


def words(text):
    return " ".join(text.split())


def statuses(folder):
    with (folder / "lab-results" / "results.csv").open() as file:
        return {(row["policy"], row["status"]) for row in csv.DictReader(file)}


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", AZURE + ROW.format(5, 10, 10) + ROW.format(4, 10, 10), "a.csv:3: "),
        ("a.csv", AZURE + ROW.format(5, -3, 10), "a.csv:2: "),
        ("a.csv", AZURE + ROW.format(5, "many", 10), "a.csv:2: "),
        ("a.csv", AZURE + ROW.format(5, 10**12, 10), "a.csv:2: "),
        ("a.csv", AZURE + "yesterday,10,10\n", "a.csv:2: "),
        ("a.csv", AZURE + "2023-11-16 18:15:05.0,10\n", "the row has 2 fields"),
        ("a.csv", AZURE, "has 0 rows"),
        ("a.csv", "", "is not known"),
        ("a.csv", "a,b\n1,2\n", "is not known"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 5', "a.jsonl:1: "),
        ("a.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": "x"}', "a.jsonl:1: "),
        ("a.jsonl", MOONCAKE.format(9) + MOONCAKE.format(8), "a.jsonl:2: "),
        ("b.csv", "TIMESTAMP,ContextTokens,OutputTokens\n" + ROW.format(5, 9, 9), "is not known"),
    ],
)
def test_the_error_for_a_malformed_trace_names_the_line(name, text, message, folder, capsys):
    (folder / name).write_text(text)
    form = "mooncake" if name.endswith("jsonl") else "azure"
    trace = f"{form}:{name}" if text.startswith(("{", AZURE)) else name
    assert main(["lab", "run", "fcfs", "--trace", trace, "--requests", "2", "--seeds", "1"]) == 2
    assert message in words(capsys.readouterr().err)


@pytest.mark.costly
@pytest.mark.parametrize(
    "load", ["0", "-0.5", "nan", "101", "fast", "0.5:0.9:1", "0.5,0.5", "0.5:1:9999999"]
)
def test_an_impossible_load_is_rejected(load, folder, capsys):
    command = ["lab", "compare", "--policies", "fcfs", "--trace", "chat", "--load", load]
    assert main(command) == 2
    assert "load" in words(capsys.readouterr().err)
    assert not (folder / "lab-results").exists()


@pytest.mark.parametrize("option", ["seeds", "requests", "replicas", "time-limit"])
def test_a_count_of_zero_is_not_replaced_by_the_default(option, folder, capsys):
    command = ["lab", "compare", "--policies", "fcfs", "--trace", "chat", f"--{option}", "0"]
    assert main(command) == 2
    error = words(capsys.readouterr().err)
    assert option.replace("-", "_") in error and "greater than" in error


@pytest.mark.parametrize("option", ["trace", "load", "slo", "engine"])
def test_an_empty_option_is_rejected(option, folder, capsys):
    command = ["lab", "compare", "--policies", "fcfs", "--trace", "chat", f"--{option}="]
    assert main(command) == 2
    assert option in words(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('workload = "chat"', "workload: must be a table of fields"),
        ("workload = []", "workload: must be a table of fields"),
        ('workload = {synthetic = "chat"}\nsetup = 0', "setup: must be a table of fields"),
    ],
)
def test_an_experiment_section_that_is_not_a_table_is_rejected(text, message, folder, capsys):
    (folder / "a.toml").write_text(f'policies = ["fcfs"]\n{text}\n')
    assert main(["lab", "compare", "a.toml"]) == 2
    assert message in words(capsys.readouterr().err)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["compare", "a.toml", "--policies="], "no policies are specified"),
        (["compare", "a.toml", "--jobs", "0"], "--jobs 0 must be between 1 and 1024"),
        (["compare", "a.toml", "--slo", "ttft:0"], "positive numbers"),
        (["compare", "a.toml", "--slo", "ttft:5,ttft:6"], "contains ttft twice"),
        (["sweep", "sarathi", "--option", "chunk=64,128", "--load", "0.5,0.7"], "runs one load"),
        (["run", "fcfs", "--strict"], "Times of linear are rough"),
        (["run", "fcfs", "--load", "0.5,0.7"], "load=0.5,0.7: this command runs one load"),
        (["adversary", "sjf", "fcfs", "--trace="], "omit --trace"),
        (["adversary", "sjf", "fcfs", "--tenants", "2"], "omit --tenants"),
    ],
)
def test_an_option_without_effect_is_rejected(command, message, folder, capsys):
    (folder / "a.toml").write_text('policies = ["fcfs"]\nworkload = {synthetic = "chat"}\n')
    trace = ["--trace", "chat"] if command[0] in ("sweep", "run") else []
    assert main(["lab", *command, *trace]) == 2
    assert message in words(capsys.readouterr().err)


def test_a_chrome_trace_that_cannot_be_written_is_an_error(folder, capsys):
    command = ["lab", "run", "fcfs", "--trace", "chat", "--requests", "20"]
    assert main([*command, "--perfetto", "none/a.json"]) == 2
    assert "--perfetto='none/a.json' cannot be written" in words(capsys.readouterr().err)


def test_an_invalid_load_is_the_only_error_that_is_reported(folder, capsys):
    command = ["lab", "compare", "--policies", "fcfs", "--trace", "chat", "--load", "-1"]
    assert main(command) == 2
    assert words(capsys.readouterr().err).count("loads") == 1


@pytest.mark.costly
def test_a_comparison_on_a_malformed_trace_is_rejected(folder, capsys):
    (folder / "a.csv").write_text(AZURE + ROW.format(5, 10, 10) + ROW.format(4, 10, 10))
    command = ["lab", "compare", "--policies", "fcfs", "--trace", "azure:a.csv", "--requests", "2"]
    assert main([*command, "--seeds", "1"]) == 2
    assert "a.csv:3: " in capsys.readouterr().err


@pytest.mark.costly
@pytest.mark.clock
def test_a_policy_that_hangs_does_not_affect_other_policies(folder, capsys):
    (folder / "good.csv").write_text(AZURE + GOOD)
    command = ["lab", "compare", "--policies", "fcfs,./bad.py:Hangs,./bad.py:Mine", *SMALL]
    command += ["--trace", "azure:good.csv", "--trust-local-code", "--time-limit", "12"]
    assert main([*command, "--no-report"]) == 1
    output = words(capsys.readouterr().out)
    assert "3 runs, 0 reused, 1 failed" in output and "time limit of 12 s" in output
    assert statuses(folder) == {("fcfs", "ok"), ("Mine", "ok"), ("Hangs", "failed")}


@pytest.mark.parametrize(
    ("name", "message"), [("Raises", "request 20 has no rank"), ("Acts", "('grant', 5)")]
)
def test_a_run_of_a_policy_that_raises_or_acts_illegally_is_an_error(name, message, folder, capsys):
    (folder / "good.csv").write_text(AZURE + GOOD)
    command = ["lab", "run", f"./bad.py:{name}", "--trace", "azure:good.csv", "--requests", "30"]
    assert main([*command, "--seeds", "1", "--trust-local-code"]) != 0
    assert message in words(capsys.readouterr().err)


@pytest.mark.costly
def test_an_invalid_option_in_a_sweep_does_not_affect_other_candidates(folder, capsys):
    command = ["lab", "sweep", "sarathi", "--option", "chunk=64,-1", "--trace", "chat", *SMALL]
    assert main(command) == 1
    output = capsys.readouterr()
    assert "chunk=64" in output.out and "chunk=-1" in output.out + output.err


@pytest.mark.costly
@pytest.mark.parametrize("command", [["replay"], ["show"], ["explain", "1"], ["diff", "fcfs"]])
def test_a_log_of_a_different_version_is_rejected(command, folder, capsys):
    assert (
        main(["lab", "run", "fcfs", "--trace", "chat", *SMALL[:2], "--decision-log", "a.log"]) == 0
    )
    log = folder / "a.log"
    first, _, rest = log.read_bytes().partition(b"\n")
    assert first.endswith(b" 1")
    log.write_bytes(first[:-1] + b"99\n" + rest)
    capsys.readouterr()
    assert main(["lab", command[0], "a.log", *command[1:]]) == 2
    assert "version" in words(capsys.readouterr().err)
    assert main(["lab", "run", "fcfs", "--trace", "log:a.log", "--requests", "9"]) == 2
    assert "version" in words(capsys.readouterr().err)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("", "scheduler='' names no scheduler"),
        ("./bad.py:Incomparable", "Incomparable failed at step 1: TypeError"),
    ],
)
def test_a_log_is_not_replayed_with_an_invalid_policy(reference, message, folder, capsys):
    log = ["--decision-log", "a.log"]
    assert main(["lab", "run", "fcfs", "--trace", "chat", "--requests", "30", *log]) == 0
    trust = ["--trust-local-code"]
    for command in (
        ["replay", "a.log", "--scheduler", reference],
        ["explain", "a.log", "9", "--scheduler", reference],
        ["diff", "a.log", reference],
    ):
        capsys.readouterr()
        assert main(["lab", *command, *trust]) == 2
        assert message in words(capsys.readouterr().err)


def test_a_calibration_of_a_different_version_is_rejected(folder, capsys):
    (folder / "old.json").write_text('{"format": "dovetail-step-times", "version": 0}')
    command = ["lab", "compare", "--policies", "fcfs", "--trace", "chat", *SMALL]
    assert main([*command, "--step-times", "old.json"]) == 2
    assert "version 0; this lab reads version 4" in words(capsys.readouterr().err)
    assert main([*command, "--step-times", "none.json"]) == 2
    assert "there is no calibration 'none.json'" in words(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trace", LONG], "is neither a file nor one of"),
        (["--trace", f"azure:{LONG}"], "is neither a file nor one of"),
        (["--trace", "chat", "--step-times", f"calibrated:{LONG}"], "there is no calibration"),
        (
            ["--trace", "chat", "--step-times", f"roofline:{LONG}", "--model", LONG],
            "is neither a file nor one of",
        ),
    ],
)
def test_a_name_that_is_too_long_for_a_file_is_rejected(options, message, capsys):
    assert main(["lab", "run", "fcfs", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_policy_in_a_file_whose_name_is_too_long_is_rejected(capsys):
    command = ["lab", "compare", "--policies", f"fcfs,./{LONG}.py:X", "--trace", "chat", *SMALL]
    assert main([*command, "--trust-local-code"]) == 2
    assert "is missing" in capsys.readouterr().err
