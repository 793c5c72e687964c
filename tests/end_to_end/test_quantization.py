"""Accuracy of the demo model with quantized weights: the short form of `bench/quantization.py`."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("dovetail_demo_model")
native_library = pytest.importorskip("dovetail_cpu.native_library")
pytestmark = pytest.mark.skipif(
    not native_library.probe_any().usable, reason="native kernels are not available on this machine"
)

BENCH = Path(__file__).resolve().parents[2] / "bench"
PER_TASK = 10
LIMITS = {"int8": (0.001, 0.99, 0.98), "int4": (0.005, 0.985, 0.97)}
"""Maximum KL divergence in nats; minimum top-1 agreement and minimum share of correct answers.
"""


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("bench_quantization", BENCH / "quantization.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    threads = torch.get_num_threads()
    spec.loader.exec_module(module)
    yield module
    torch.set_num_threads(threads)


def test_quantization_keeps_the_accuracy_of_the_demo_model(script, note, capsys):
    plain, *rows = script.report(
        PER_TASK,
        0,
        [form for form in script.FORMATS if form.name in ("int8", "int4 g32")],
    )
    capsys.readouterr()
    script.print_table([plain, *rows], 10 * PER_TASK)
    note(capsys.readouterr().out.rstrip())
    for row, (kl, top1, right) in zip(rows, LIMITS.values(), strict=True):
        actual = row["demo"]
        assert actual["num_positions"] > 1000
        assert 0 < actual["kl"] < kl, row
        assert actual["top1"] > top1, row
        assert row["right"] >= right, row
    assert rows[0]["demo"]["kl"] < rows[1]["demo"]["kl"]
