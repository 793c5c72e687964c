"""An engine exits with its owner. A forked child cannot use, stop or keep alive the engine."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def kinds(*quick):
    """Return all kinds of engines as parameters. Kinds that are not in `quick` are marked slow."""
    every = ("OverProcess", "WithWorkers", "InProcess", "Client", "Supervised", "AsyncClient")
    every += ("AsyncSupervised", "AsyncFrontEnd")
    marks = {name: () if name in quick else pytest.mark.slow for name in every}
    return pytest.mark.parametrize(
        "kind", [pytest.param(name, marks=mark) for name, mark in marks.items()]
    )


@pytest.fixture
def run(tmp_path, tmp_path_factory):
    """Run a scenario in a separate process: `run("Client", "drop")`. The time limit is 40 s."""
    config = {"architectures": ["X"], "vocab_size": 300, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = tmp_path_factory.mktemp("t")
    environment = {**os.environ, "PYTHONPATH": str(HERE), "TMPDIR": str(folder)}

    def start(kind, what):
        return subprocess.run(
            [sys.executable, str(HERE / "owner_scenario.py"), str(tmp_path), kind, what],
            env=environment,
            timeout=40,
            capture_output=True,
            text=True,
        )

    yield start
    assert not [name for name in os.listdir(folder) if name.startswith("dovetail-")]


def observed(process):
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert result["left"] == {"children": [], "threads": [], "open_resources": [True] * 3}, (
        process.stderr
    )
    return result["observed"]


@pytest.mark.costly
@pytest.mark.sampled(6)
@kinds("OverProcess", "WithWorkers", "AsyncFrontEnd")
def test_an_engine_is_shut_down_when_its_last_reference_is_dropped(run, kind):
    assert observed(run(kind, "drop")) < 5


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize("what", ["leave", "leave_in_a_cycle", "leave_by_an_error"])
@kinds("OverProcess")
def test_an_open_engine_does_not_delay_the_exit_of_its_process(run, kind, what):
    process = run(kind, what)
    assert process.returncode == (what == "leave_by_an_error"), process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", ["OverProcess", "WithWorkers", "AsyncFrontEnd"])
def test_using_an_engine_after_its_owner_has_exited_raises_a_typed_error(run, kind):
    """Use the engine in an exit hook, and in a finalizer that runs after the engine's finalizer."""
    process = run(kind, "leave_and_use")
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == "EngineDeadError", process.stderr
    assert observed(run(kind, "use_in_a_finalizer")) == ["EngineDeadError"]


@pytest.mark.costly
@pytest.mark.sampled(6)
@kinds("OverProcess", "WithWorkers", "AsyncFrontEnd")
def test_a_forked_child_cannot_use_or_stop_the_engine(run, kind):
    result = observed(run(kind, "fork"))
    assert result["statuses"].pop("by_error") == 1
    assert set(result["statuses"].values()) == {0}, result
    assert result["served"]


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["OverProcess", "WithWorkers"])
def test_an_engine_exits_with_its_owner_even_if_a_forked_child_still_runs(run, traffic, kind):
    process = run(kind, "outlive")
    assert process.returncode == -signal.SIGKILL
    result = json.loads(process.stdout)
    child = result["child"]
    try:
        others = [pid for pid in result["children"] if pid != child]
        assert others and not any(traffic.is_running(pid) for pid in others)
        assert traffic.is_running(child)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.costly
def test_an_engine_restarts_although_the_working_directory_was_deleted(run):
    assert observed(run("SupervisedWorkers", "without_directory"))
