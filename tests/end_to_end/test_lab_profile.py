"""`lab profile` measures the demo model, and its file is a step-time model of `lab run`."""

import csv
import json

import pytest

from dovetail.cli import main

SMALL = ["--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--max-model-len", "64"]
SMALL += ["--num-blocks", "9", "--num-threads", "1"]
EXPERIMENT = """
policies = ["fcfs"]
workload = {synthetic = "chat", num_requests = 20}
loads = [0.5]
seeds = 1
[setup]
max_num_seqs = 2
max_num_batched_tokens = 32
max_model_len = 64
num_blocks = 9
step_times = "mine.json"
model = "demo"
"""


@pytest.mark.timeout(120)
def test_a_measured_calibration_determines_the_times_of_a_simulation(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["lab", "profile", "--model", "demo", "--seconds", "0.1", "--out", "mine.json"]
    assert main([*command, *SMALL]) == 0
    told = capsys.readouterr().out
    assert "per prefill token" in told and "Wrote mine.json" in told
    file = json.loads((tmp_path / "mine.json").read_text())
    assert file["engine"]["num_threads"] == 1 and file["engine"]["max_num_seqs"] == 2
    assert file["quality"]["num_steps"] > 100 and abs(file["quality"]["bias"]) < 0.2
    assert file["commit"] and file["machine"]["num_cores"] >= 1

    (tmp_path / "small.toml").write_text(EXPERIMENT)
    means = []
    for step_ps in (file["step_ps"]["step"], 10**11):
        file["step_ps"]["step"] = step_ps
        (tmp_path / "mine.json").write_text(json.dumps(file))
        assert main(["lab", "compare", "small.toml", "--no-report", "--strict"]) == 0
        assert "1 reused" not in capsys.readouterr().out, "another file is another run"
        with (tmp_path / "lab-results" / "results.csv").open() as rows:
            found = {row["metric"]: row["value"] for row in csv.DictReader(rows)}
        means.append(float(found["tpot_mean"]))
    assert 0.0001 < means[0] < 0.1 < means[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "demo", "--seconds", "0"], "--seconds 0 must be above 0"),
        (["--model", "none-such"], "none-such"),
        (["--model", "demo", "--max-num-seqs", "0"], "max_num_seqs"),
        (["--model", "demo", "--num-blocks", "5"], "needs num_blocks of at least"),
    ],
)
def test_an_impossible_profile_is_rejected(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["lab", "profile", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())
