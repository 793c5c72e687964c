"""After a fault during startup or a step, no process hangs and no resource leaks."""

import json
import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from dovetail.faults import POINTS, VARIABLE
from dovetail_devkit.harnesses.process_tree import state_of

HERE = Path(__file__).parent
ACTIONS = ("raise", "kill", "exit=3", "delay=0.3", "stop")
LIMIT_S = 30.0
"""A run with a fault may take this many seconds longer than a run without a fault."""

IN_PROCESS = ("uniproc.", "start.init_device", "start.load_model")
FRONT_END = "client."
SAMPLE = (
    ("start.load_model", "raise"),
    ("start.warm_up", "kill"),
    ("client.receive", "raise"),
    ("engine.bind", "exit=3"),
    ("worker.load_model", "raise"),
    ("worker.before_sample", "kill"),
    ("core.schedule", "raise"),
    ("engine.send", "stop"),
)
EVERY = [(point, action) for point in POINTS for action in ACTIONS]


@dataclass
class ScenarioRun:
    """The result of one run of the scenario. status: exit status of the process."""

    status: int
    result: dict
    errors: str
    took_s: float
    survivors: list
    folders: list


@pytest.fixture(scope="module")
def run_scenario(tmp_path_factory):
    """Return a function that runs the scenario: `run_scenario(executor, faults)`."""
    model = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["ControlledWorker"],
        "vocab_size": 97,
        "max_position_embeddings": 512,
    }
    (model / "config.json").write_text(json.dumps(config))

    def run(executor, faults=""):
        folder = tmp_path_factory.mktemp("t")
        return live(model, executor, faults, folder)

    return run


def live(model, executor, faults, folder):
    mark = f"SWEEP={uuid.uuid4()}"
    environment = {**os.environ, VARIABLE: faults, "PYTHONPATH": str(HERE), "TMPDIR": str(folder)}
    environment["SWEEP"] = mark.partition("=")[2]
    command = [sys.executable, str(HERE / "fault_scenario.py"), str(model), executor]
    start = time.monotonic()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, errors = communicate(process, faults)
        finally:
            process.kill()
    took_s = time.monotonic() - start
    result = [line for line in out.splitlines() if line.startswith("{")]
    return ScenarioRun(
        status=process.returncode,
        result=json.loads(result[-1]) if result else {},
        errors=errors,
        took_s=took_s,
        survivors=survivors(mark),
        folders=[name for name in os.listdir(folder) if name.startswith("dovetail-")],
    )


def communicate(process, faults):
    """Return the process's output. Kill a front end that has stopped itself."""
    if faults.startswith(FRONT_END) and faults.endswith(":stop"):
        for _ in range(400):
            if state_of(process.pid) == "T":
                process.kill()
                break
            time.sleep(0.05)
    return process.communicate(timeout=60)


def survivors(mark):
    """Return the processes of a scenario that still exist 5 s after it has ended."""
    for _ in range(50):
        actual = [pid for pid in os.listdir("/proc") if pid.isdecimal() and has_mark(pid, mark)]
        if not actual:
            return []
        time.sleep(0.1)
    return actual


def has_mark(pid, mark):
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except (OSError, ProcessLookupError):
        return False


@pytest.fixture(scope="module")
def healthy(run_scenario):
    """A run without a fault."""
    return run_scenario("multiproc")


def executor_of(point):
    return "uniproc" if point.startswith(IN_PROCESS) else "multiproc"


CASES = [
    pytest.param(*case, id="-".join(case), marks=() if case in SAMPLE else pytest.mark.soak)
    for case in EVERY
]


@pytest.mark.costly
def test_an_engine_without_injected_faults_succeeds(healthy):
    assert healthy.status == 0 and healthy.result["outcome"] == "served", healthy
    assert healthy.result["message"].strip() == "" and len(healthy.result["tokens"]) == 12
    assert healthy.result["left"] == healthy.survivors == healthy.folders == []


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize(("point", "action"), CASES)
def test_every_fault_is_reported_without_hangs_or_leaks(run_scenario, healthy, point, action):
    actual = run_scenario(executor_of(point), f"{point}:{action}")
    assert actual.survivors == [], actual
    assert actual.took_s < LIMIT_S + healthy.took_s, actual
    of_the_front_end = point.startswith(FRONT_END)
    if of_the_front_end and action in ("kill", "stop", "exit=3"):
        # The directory remains if the process is killed before it starts the process for its
        # removal.
        assert actual.folders == [] or point in ("client.boot", "client.spawn"), actual
        return
    assert actual.folders == [] == actual.result["left"], actual
    phase = point.partition(".")[2] + ")" if point.startswith("start.") else ""
    named = [f"injected at {point}", f"(startup phase: {phase}"]
    named += ["SIGKILL", "status 3", "no heartbeat", "within", "ended", "InjectedError"]
    message = actual.result["message"]
    if message.strip():
        assert any(name in message for name in named), actual
    else:
        # The engine recovered, or the fault occurred when no caller was waiting.
        assert actual.result["outcome"] == "served"
        assert actual.result["tokens"] == healthy.result["tokens"], actual
    if actual.result["tokens"]:
        assert actual.result["tokens"] == healthy.result["tokens"], actual


@pytest.mark.costly
def test_every_fault_point_is_reached(run_scenario, tmp_path):
    record = tmp_path / "seen"
    for executor in ("uniproc", "multiproc"):
        assert run_scenario(executor, f"*:record={record}").result["outcome"] == "served"
    assert set(record.read_text().split()) == set(POINTS)
