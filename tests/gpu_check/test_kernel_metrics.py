"""The scripts that measure kernels print and store each metric as soon as it is known."""

import json
import sys

import pytest
import torch
from gpu import metrics as kernel_metrics
from gpu.metrics import NO_GPU, Metric, median_s, report_metrics
from gpu.stopwatch import time_calls


def metrics(device, small):
    yield Metric(name="first", value=2.5, unit="us", note=f"{device}, {small}")
    yield Metric(name="second", value=3.0, unit="us", note="")
    raise RuntimeError("the device has failed")


@pytest.fixture
def run(monkeypatch, tmp_path):
    def report(*words, has_gpu=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
        monkeypatch.setattr(sys, "argv", ["a.py", "--json", str(tmp_path / "a.json"), *words])
        return report_metrics("bench/gpu/a.py", "Measure.", metrics)

    return report


def test_a_script_that_fails_keeps_the_metrics_before_the_failure(run, tmp_path, capsys):
    with pytest.raises(RuntimeError):
        run("--small")
    stored = json.loads((tmp_path / "a.json").read_text("utf-8"))["metrics"]
    assert [item["name"] for item in stored] == ["first", "second"]
    assert stored[0] == {"name": "first", "value": 2.5, "unit": "us", "note": "cuda, True"}
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["first", "second"]


@pytest.mark.parametrize("words", [(), ("--device", "cpu")])
def test_a_script_without_a_gpu_exits_with_its_code(run, words, capsys):
    assert run(*words, has_gpu=bool(words)) == NO_GPU
    assert "bench/gpu/a.py needs a GPU" in capsys.readouterr().out


def test_the_time_of_a_call_is_the_median_of_the_rounds_after_the_warm_ups(monkeypatch):
    calls = []

    def timed(call, device, **options):
        assert device == "cuda"
        return [float(len(calls)) for _ in time_calls(call, "fake", **options)]

    monkeypatch.setattr(kernel_metrics, "time_calls", timed)
    assert median_s(lambda: calls.append(1)) == len(calls) == 12
