"""`lab compare`, `lab sweep` and `lab adversary` with the real scheduler and the simulator."""

import csv
import json

import pytest

from dovetail.cli import main
from dovetail_lab.commands.experiment_options import run_text
from dovetail_lab.experiments.run_files import RunRecord
from dovetail_lab.experiments.run_key import CAPACITY_LOAD, RunKey

SMALL = ["--requests", "60", "--seeds", "3", "--jobs", "1"]

MINE = """
from dovetail.interfaces import Policy

class Mine(Policy):
    def rank(self, request, view):
        return request.num_prompt_tokens, request.sequence

class Broken(Policy):
    def rank(self, request, view):
        if request.sequence == 30:
            raise ValueError("rank 30 is broken")
        return request.sequence

class Cheating(Policy):
    def plan(self, view):
        yield "not an action"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the current directory, which contains ./mine.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.costly
def test_the_compare_command_runs_policies_of_packages_and_files_and_writes_a_report(
    folder, capsys
):
    policies = "fcfs,sarathi,./mine.py:Mine"
    command = ["lab", "compare", "--policies", policies, "--trace", "azure:conv", *SMALL]
    options = ["--load", "0.5,0.9", "--tenants", "2", "--slo", "ttft:500,tpot:50"]
    assert main([*command, *options, "--trust-local-code", "--out", "out"]) == 0
    output = capsys.readouterr()
    assert "18 runs, 0 reused, 0 failed" in output.out and "18 of 18 runs" in output.err
    assert "Mine" in output.out and "paired differences to fcfs" in output.out
    page = (folder / "out/report.html").read_text()
    assert "<h2>Tenants</h2>" in page and "mine.py:Mine" in page
    assert {row["policy"] for row in rows_of(folder / "out/results.csv")} == {
        "fcfs",
        "sarathi",
        "Mine",
    }
    again = [*command, *options, "--trust-local-code", "--out", "out", "--no-report"]
    assert main(again) == 0
    assert "18 runs, 18 reused" in capsys.readouterr().out


@pytest.mark.costly
def test_sarathi_shortens_the_largest_gap(folder, capsys):
    command = ["lab", "compare", "--policies", "fcfs,sarathi", "--trace", "azure:conv", *SMALL]
    assert main([*command, "--load", "0.8", "--no-report"]) == 0
    rows = rows_of(folder / "lab-results/differences.csv")
    (row,) = (row for row in rows if row["metric"] == "gap_mean")
    assert row["verdict"] == "better" and float(row["difference"]) < 0
    assert not (folder / "lab-results/report.html").exists()


@pytest.mark.costly
def test_declared_lengths_change_the_order_of_sjf(folder, capsys):
    (folder / "few.toml").write_text(
        'policies = ["fcfs", "sjf"]\nloads = [1.3]\nseeds = 6\n'
        "[workload]\nsynthetic = 'chat'\nnum_requests = 120\n[setup]\nmax_num_seqs = 4\n"
    )
    verdicts = {}
    for kind in ("none", "exact"):
        command = ["lab", "compare", "few.toml", "--no-report", "--expected-tokens", kind]
        assert main([*command, "--out", kind]) == 0
        rows = rows_of(folder / kind / "differences.csv")
        verdicts[kind] = next(r["verdict"] for r in rows if r["metric"] == "norm_latency")
    assert verdicts == {"none": "equal", "exact": "better"}


@pytest.mark.costly
def test_a_policy_that_raises_or_breaks_the_contract_does_not_affect_other_policies(folder, capsys):
    policies = "fcfs,./mine.py:Broken,./mine.py:Cheating,./mine.py:Mine"
    command = ["lab", "compare", "--policies", policies, "--trace", "chat", *SMALL]
    assert main([*command, "--load", "0.5", "--trust-local-code"]) == 1
    output = capsys.readouterr().out
    assert "12 runs, 0 reused, 6 failed" in output
    assert "rank 30 is broken" in output and "is not an action" in output
    rows = rows_of(folder / "lab-results/results.csv")
    ok = {row["policy"] for row in rows if row["status"] == "ok"}
    assert ok == {"fcfs", "Mine"}
    assert "6 of 12 runs failed" in (folder / "lab-results/report.html").read_text()


@pytest.mark.parametrize(
    "command",
    [
        ["compare", "--policies", "fcfs,POLICY", "--trace", "chat"],
        ["compare", "--policies", "POLICY,fcfs", "--trace", "chat"],
        ["sweep", "POLICY", "--option", "chunk=1,2", "--trace", "chat"],
        ["sweep", "fcfs", "--option", "chunk=1,2", "--trace", "chat", "--baseline", "POLICY"],
        ["adversary", "POLICY", "fcfs"],
        ["adversary", "fcfs", "POLICY"],
    ],
)
@pytest.mark.parametrize(
    ("policy", "trust", "message"),
    [
        ("./mine.py:Mine", [], "pass --trust-local-code"),
        ("./gone.py:Mine", ["--trust-local-code"], "gone.py' is missing"),
        ("sarathy", [], "Did you mean 'sarathi'?"),
    ],
)
def test_a_policy_that_no_run_can_load_is_rejected_before_the_first_run(
    command, policy, trust, message, folder, capsys
):
    words = [word.replace("POLICY", policy) for word in command]
    assert main(["lab", *words, *trust]) == 2
    error = capsys.readouterr().err.replace("\n", " ")
    assert message in error and "0 of " not in error  # the first line of the progress
    assert not (folder / "lab-results").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("chunck=1,2", "has no option 'chunck'. Did you mean 'chunk'?"),
        ("chunk=a,b", "chunk='a': Input should be a valid integer"),
    ],
)
def test_a_wrong_option_of_an_installed_policy_is_rejected_before_the_first_run(
    option, message, folder, capsys
):
    assert main(["lab", "sweep", "sarathi", "--option", option, "--trace", "chat"]) == 2
    error = capsys.readouterr().err.replace("\n", " ")
    assert message in error and "0 of " not in error


@pytest.mark.parametrize(("load", "name"), [(CAPACITY_LOAD, "capacity"), (0.9, "load 0.9")])
def test_the_progress_names_the_runs_that_measure_the_capacity(load, name):
    key = RunKey(policy="fcfs", load=load, rate=0.0, seed=1, engine="sim")
    assert run_text(RunRecord(run_id="a", key=key, status="ok")) == f"fcfs {name} seed 1"


@pytest.mark.costly
def test_flags_override_fields_of_the_file(folder, capsys):
    (folder / "small.toml").write_text(
        'policies = ["fcfs", "vtc"]\nloads = [0.5, 0.9]\nseeds = 2\n'
        "[workload]\nsynthetic = 'greedy_tenant'\nnum_requests = 50\n"
        "[setup]\nnum_blocks = 4000\n"
    )
    command = ["lab", "compare", "small.toml", "--load", "0.7", "--no-report", "--out", "o"]
    assert main(command) == 0
    output = json.loads((folder / "o/experiment.json").read_text())
    assert output["loads"] == [0.7] and output["seeds"] == 2 and output["name"] == "small"
    assert output["setup"]["num_blocks"] == 4000
    assert main([*command, "--trace", "azure:code", "--step-times", "linear:decode_ps=0"]) == 0
    output = json.loads((folder / "o/experiment.json").read_text())
    assert output["workload"]["trace"] == "azure:code" and not output["workload"]["synthetic"]
    assert output["setup"]["step_times"] == "linear:decode_ps=0"


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no policies"),
        (["--policies", "fcfs"], "no workload is specified. Write --trace chat"),
        (["--policies", "fcfs", "--trace", "azur:conv"], "Did you mean 'azure:conv'"),
        (["--policies", "fcfs", "--trace", "chat", "--load", "-1"], "loads.0"),
        (["--policies", "fcfs", "--trace", "chat", "--slo", "ttft=5"], "slo='ttft=5'"),
        (["--policies", "fcfs", "--trace", "chat", "--jobs", "-2"], "--jobs -2"),
        (["--policies", "fcsf", "--trace", "chat"], "Did you mean 'fcfs'"),
        (["--policies", "fcfs,stff", "--trace", "chat"], "There is no scheduler plugin 'stff'"),
        (["--policies", "fcfs", "--trace", "chat", "--step-times", "gpu"], "step_times='gpu'"),
        (["--policies", "fcfs", "--trace", "azure:code", "--requests", "9000"], "8,819 rows"),
        (["none.toml", "--policies", "fcfs"], "cannot be read: No such file or directory."),
        (["misspelled.toml", "--trace", "chat"], "Did you mean 'policies'?"),
        (["workloads.toml", "--policies", "fcfs"], "Did you mean 'workload'?"),
    ],
)
def test_an_impossible_comparison_is_rejected(arguments, message, folder, capsys):
    (folder / "misspelled.toml").write_text('policis = ["fcfs"]\n')
    (folder / "workloads.toml").write_text('[workloads]\ntrace = "chat"\n')
    assert main(["lab", "compare", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.costly
def test_the_sweep_command_prints_the_options_from_best_to_worst(folder, capsys):
    command = ["lab", "sweep", "sarathi", "--option", "chunk=64,2048", "--metric", "gap_mean"]
    assert main([*command, "--trace", "azure:conv", *SMALL, "--load", "0.7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.startswith("chunk=")]
    assert [row[0] for row in rows] == ["chunk=64", "chunk=2048"] and rows[0][2] == "better"


@pytest.mark.costly
def test_the_adversary_command_writes_an_experiment_that_the_compare_command_repeats(
    folder, capsys
):
    command = ["lab", "adversary", "fcfs", "sarathi", "--trials", "3", "--metric", "gap_mean"]
    options = ["--requests", "40", "--seeds", "1", "--out", "out", "--jobs", "1"]
    assert main([*command, *options]) == 0
    output = capsys.readouterr().out
    assert "With 10 new seeds, fcfs has a regret of +" in output
    assert main(["lab", "compare", "out/adversary.json", "--out", "out", "--no-report"]) == 0
    assert "20 runs, 20 reused" in capsys.readouterr().out
    assert main([*command, "--trace", "chat"]) == 2
    assert "omit --trace" in capsys.readouterr().err


@pytest.mark.costly
def test_the_run_command_writes_a_decision_log_for_the_explain_and_diff_commands(folder, capsys):
    command = ["lab", "run", "fcfs", "--trace", "azure:conv", "--requests", "80", "--load", "2"]
    assert main([*command, "--decision-log", "a.log", "--perfetto", "a.json"]) == 0
    output = capsys.readouterr().out
    assert "80 requests at" in output and "Time to first token, mean" in output
    assert len(json.loads((folder / "a.json").read_text())["traceEvents"]) > 300
    assert main(["lab", "replay", "a.log"]) == 0
    assert main(["lab", "explain", "a.log", "5"]) == 0
    capsys.readouterr()
    assert main(["lab", "diff", "a.log", "sarathi"]) == 1
    assert "511 with sarathi" in capsys.readouterr().out
    assert main(["lab", "run", "fcfs", "--trace", "log:a.log", "--seeds", "1", *command[5:7]]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "10"], "--seed 10 must be between 0 and 9"),
        (["--engine", "real"], "this command only simulates"),
        (["--decision-log", "none/a.log"], "cannot be written"),
    ],
)
def test_an_impossible_run_is_rejected(arguments, message, folder, capsys):
    assert main(["lab", "run", "fcfs", "--trace", "chat", "--requests", "20", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
