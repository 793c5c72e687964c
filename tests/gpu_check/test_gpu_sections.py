"""Tests parts of the GPU check's sections: counts, parts of suites, reports, model shapes."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
from gpu.engine_runs import report_agreement
from gpu.report import Report, Task, read_report
from gpu.sections import vllm
from gpu.sections.conformance import _PARTS, read_counts
from gpu.sections.synchronization import _WARM_STEPS, watched_worker
from gpu.shapes import SHAPES, num_read_bytes, num_weight_bytes, write_shape

from dovetail.config.model_directory import ModelDirectory
from dovetail.plugins import PluginRegistry
from dovetail_devkit.suites.attention import attention_cases
from parity.margin_rule import Agreement

FAKE_VLLM = """
import time

class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos):
        assert ignore_eos and temperature == 0

class LLM:
    def __init__(self, model, load_format, max_model_len, **_):
        assert load_format == "dummy" and max_model_len > 8

    def generate(self, prompts, params, use_tqdm):
        assert all(list(prompt) == ["prompt_token_ids"] for prompt in prompts)
        time.sleep(0.1 * len(prompts))
"""
SAID = """\
........
============================= dovetail conformance =============================
attention:torch: 150 passed, 1 failed, 0 error, 7 skipped
  7 skipped: it is Sunday
ops:torch: 3 passed, 0 failed, 0 error, 0 skipped
"""


def test_the_counts_that_the_conformance_kit_prints_are_parsed():
    counts = {"passed": 150, "failed": 1, "error": 0, "skipped": 7}
    assert read_counts("attention:torch", SAID) == counts
    assert read_counts("attention:triton", SAID) == {}


def test_the_parts_of_a_conformance_suite_are_complete_and_disjoint():
    cls = PluginRegistry().load("attention", "torch")
    names = [case.name for case in attention_cases(cls, torch.device("cpu"))]
    words = ("float32", "bfloat16", "float16")
    for name in [*names, "manifest", "contract"]:
        held = {word: word in name for word in words}
        assert sum(bool(eval(part, {}, held)) for part in _PARTS["attention"]) == 1, name
    assert len(names) > 100


def test_a_report_is_written_after_every_entry(tmp_path):
    file = tmp_path / "report.json"
    assert read_report(file)["metrics"] == []
    report = Report(file=file)
    report.metric("one", 1.5, unit="s")
    assert read_report(file)["metrics"] == [{"name": "one", "value": 1.5, "unit": "s", "note": ""}]
    report.fail("wrong")
    report.plugin("ops:x", {"passed": 3})
    report.fact("seen", [1])
    result = read_report(file)
    assert result["wrong"] == ["wrong"] and result["plugins"] == {"ops:x": {"passed": 3}}
    assert result["facts"] == {"seen": [1]}


def test_the_report_of_several_runs_has_the_total_agreement_and_the_largest_error(tmp_path):
    valid = {"positions": 100, "qualifying": 99, "qualifying_equal": 99, "max_error": 1e-6}
    bad = {"positions": 100, "qualifying": 90, "qualifying_equal": 88, "max_error": 1e-3}
    report = Report(file=tmp_path / "report.json")
    report_agreement([Agreement(**valid), Agreement(**bad)], report)
    result = {metric["name"]: metric["value"] for metric in report.metrics}
    assert result == {
        "max_error": 1e-3,
        "qualify": pytest.approx(90.0),
        "equal": pytest.approx(100 * 187 / 189),
    }


@pytest.mark.parametrize("name", SHAPES)
def test_a_model_shape_is_written_as_a_model_directory(name, tmp_path):
    model = ModelDirectory.open(write_shape(name, tmp_path))
    assert model.architecture == "Qwen3ForCausalLM"


def test_model_shapes_have_the_parameter_counts_of_their_names():
    for name, billions in (("qwen3-0.6b", 0.6), ("qwen3-8b", 8.2)):
        assert num_weight_bytes(name) / 2 == pytest.approx(billions * 1e9, rel=0.02)
    assert num_read_bytes("qwen3-0.6b") == num_weight_bytes("qwen3-0.6b")  # tied
    assert num_weight_bytes("qwen3-8b") - num_read_bytes("qwen3-8b") == 2 * 151936 * 4096


@pytest.mark.soak
def test_dovetail_is_compared_with_vllm_if_it_is_installed(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    bench = Path(vllm.__file__).parents[2]
    folders = [str(tmp_path), str(bench), str(bench.parent / "tests")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    monkeypatch.syspath_prepend(str(tmp_path))
    report = Report(file=tmp_path / "report.json")
    vllm.run(Task(device="cpu", small=True, folder=tmp_path, seed=1), report)
    assert not report.wrong
    assert {metric["name"] for metric in report.metrics} == {"one", "many"}
    for metric in report.metrics:  # 8 tokens of each request in 0.1 s
        own, other = metric["note"].removesuffix(" tokens/s").replace(",", "").split(" and ")
        assert 30 < float(other) <= 80
        assert metric["value"] == pytest.approx(100 * float(own) / float(other), rel=0.05)


class Detector:
    """Replaces a torch module such as `torch.cuda`. Its synchronization detector is on or off."""

    mode = "default"

    def set_sync_debug_mode(self, mode):
        warnings.warn("does not yet detect all synchronizing operations", stacklevel=1)
        self.mode = mode


class WaitingWorker:
    """Waits for the device twice in every step: at launch and at sampling."""

    detector = Detector()

    def __init__(self, context):
        pass

    def wait(self):
        if self.detector.mode == "warn":
            warnings.warn("called a synchronizing operation", stacklevel=1)

    def execute_model(self, plan):
        self.wait()

    def sample_tokens(self, grammar=None):
        self.wait()
        warnings.warn("something else", stacklevel=1)
        if grammar == "fail":
            raise ValueError("lost")
        return "tokens"


@pytest.mark.filterwarnings("ignore:something else", "ignore:does not yet detect")
def test_synchronizations_of_a_step_are_counted_after_the_warm_up():
    worker = watched_worker(WaitingWorker, WaitingWorker.detector)(None)
    for _ in range(_WARM_STEPS + 3):
        worker.execute_model("plan")
        assert worker.sample_tokens() == "tokens"
    steps, waits = worker.take_waits()
    assert steps == 3
    ((index, count),) = waits.items()
    assert index.startswith(__file__) and count == 6
    with pytest.raises(ValueError, match="lost"):
        worker.sample_tokens("fail")
    assert WaitingWorker.detector.mode == "default"
