"""A benchmark script that exceeds its time limit keeps the results that it has already measured."""

from gpu import kernel_bench
from gpu.report import Report, Task

SLOW = """
import json, pathlib, sys, time
file = pathlib.Path(sys.argv[sys.argv.index("--json") + 1])
file.write_text(json.dumps({"metrics": [{"name": "first", "value": 2.5}]}))
time.sleep(60)
"""


def test_a_benchmark_killed_at_its_deadline_keeps_its_measurements(tmp_path, monkeypatch):
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.setattr(kernel_bench, "HERE", tmp_path)
    report = Report(file=tmp_path / "report.json")
    deadline_s = kernel_bench._MARGIN_S + 1.0
    task = Task(device="cuda", small=True, folder=tmp_path, seed=1, deadline_s=deadline_s)
    kernel_bench.run_script("slow", task, report)
    assert [(metric["name"], metric["value"]) for metric in report.metrics] == [("first", 2.5)]
    assert report.wrong[0].startswith("slow.py did not finish within 1 s")
