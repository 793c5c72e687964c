"""The notebook examples/scheduler_lab.ipynb: its cells run in order, with small numbers."""

import ast
import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "scheduler_lab.ipynb"
SIZES = "REQUESTS, SEEDS, PROCESSES = 300, 10, 2"
SMALL = "REQUESTS, SEEDS, PROCESSES = 30, 2, 1"


def run_cell(source, names):
    """Execute a cell. Return the value of its last line, as a notebook shows it."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(NOTEBOOK), "exec"), names)
    return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names) if last else None


@pytest.mark.timeout(240)
def test_every_cell_of_the_notebook_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert sum(SIZES in source for source in sources) == 1
    assert not any(cell.get("outputs") for cell in cells), "outputs are not committed"
    names = {"__name__": "__main__"}
    shown = [run_cell(source.replace(SIZES, SMALL), names) for source in sources]

    output = capsys.readouterr().out
    assert "Time to first token, mean" in output, "lab run prints its metrics"
    assert "18 runs, 0 failed" in output
    charts = [item._repr_html_() for item in shown if hasattr(item, "figure")]
    assert len(charts) == 3 and all(chart.startswith("<svg") for chart in charts)
    means = next(item for item in shown if getattr(item, "shape", ()) == (9, 3))
    assert set(means.columns) == {"fcfs", "hrrn", "ShortPrompts"} and (means > 0).any(axis=None)
    assert "ShortPrompts" in output and "fcfs" in output
    codes = [item for item in shown if type(item) is int]
    assert codes[-2:] == [0, 1], "explain; diff ends with 1, because it has found a difference"
    assert names["measured"].value.max() > 0
