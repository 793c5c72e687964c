"""`lab profile` measures the demo model, and `lab run` uses its file as a step-time model."""

import json

import pytest

from dovetail.cli import main

SMALL = ["--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--max-model-len", "48"]
SMALL += ["--num-blocks", "7", "--num-threads", "1"]


@pytest.mark.costly
@pytest.mark.clock
@pytest.mark.timeout(120)
def test_a_measured_calibration_is_a_step_time_model_of_this_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["lab", "profile", "--model", "demo", "--seconds", "0.1", "--out", "mine.json"]
    assert main([*command, *SMALL]) == 0
    output = capsys.readouterr().out
    assert "per prefill token" in output and "Wrote mine.json" in output
    file = json.loads((tmp_path / "mine.json").read_text())
    assert file["engine"]["num_threads"] == 1 and file["engine"]["max_num_seqs"] == 2
    assert file["quality"]["num_steps"] > 100 and abs(file["quality"]["bias"]) < 0.2
    assert file["commit"] and file["machine"]["num_cores"] >= 1

    command = ["lab", "run", "fcfs", "--trace", "chat", "--requests", "20", "--seeds", "1"]
    assert main([*command, "--step-times", "mine.json", "--model", "demo"]) == 0
    shown = capsys.readouterr()
    assert "another machine" not in shown.err and "another model" not in shown.err
    assert "max_num_seqs=256 is extrapolated" in " ".join(shown.err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "demo", "--seconds", "0"], "--seconds 0 must be positive"),
        (["--model", "none-such"], "none-such"),
        (["--model", "demo", "--max-num-seqs", "0"], "max_num_seqs"),
        (["--model", "demo", "--num-blocks", "4"], "needs num_blocks of at least"),
    ],
)
def test_invalid_arguments_of_lab_profile_are_rejected(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["lab", "profile", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())
