"""The commands `dovetail lab replay` and `dovetail lab show`."""

import json
from array import array

import pytest

from dovetail import LLM
from dovetail.cli import main
from dovetail.clock import ManualClock
from dovetail.decision_log import DecisionRecorder, RecordedScheduler
from dovetail.interfaces import SchedulerContext, SchedulerLimits
from dovetail.request import EngineCoreRequest
from dovetail.result import ModelRunnerOutput
from dovetail.sampling_params import SamplingParams
from dovetail.scheduling import Scheduler
from dovetail_devkit.contexts import SMALL_ENGINE, write_fake_config
from dovetail_devkit.scheduler.random_programs import make_kv_cache

MS = 1_000_000
SCHEDULER = "dovetail.scheduling.scheduler:Scheduler"


@pytest.fixture
def log(tmp_path):
    """Record three requests with two batch slots in five steps of 2 ms; the last request is served
    first."""
    clock, path = ManualClock(7 * MS), tmp_path / "run.log"
    context = SchedulerContext(
        limits=SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32),
        kv_cache=make_kv_cache(num_blocks=33, block_size=4),
        clock=clock,
    )
    recorder = DecisionRecorder(path, Scheduler, context)
    scheduler = RecordedScheduler(Scheduler(recorder.context), recorder)
    for number, name in enumerate("abc"):
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=array("i", [number % 2, 2, 3, 4, 5]),
            sampling_params=SamplingParams(max_tokens=3),
            max_tokens=3,
            priority=-number,
        )
        scheduler.add_request(request)
    for _ in range(5):
        clock.advance(2 * MS)
        plan = scheduler.schedule()
        tokens = array("i", [8]) * len(plan.rows)
        output = ModelRunnerOutput(step_id=plan.step_id, num_sampled=plan.samples, token_ids=tokens)
        scheduler.update_from_output(plan, output)
    scheduler.abort_requests(["c"])
    scheduler.shutdown()
    return path


def test_the_replay_command_reports_that_every_plan_is_the_same(log, capsys):
    assert main(["lab", "replay", str(log)]) == 0
    output = capsys.readouterr().out
    assert output.startswith(
        "dovetail.scheduling.scheduler:Scheduler: 5 steps of 3 requests, 0.010 s of"
    )
    assert "steps/s" in output and "Every plan is the same, byte for byte." in output


def test_the_replay_command_shows_both_values_of_the_first_difference(log, capsys):
    assert main(["lab", "replay", str(log), "--scheduler", "priority"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("priority: 0 steps") and "Step 0 is the first" in lines[1]
    shown = [line.split(maxsplit=2) for line in lines[2:]]
    assert [row[:2] for row in shown] == [["joins", "log"], ["joins", "replay"]]
    assert "request_id='a'" in shown[0][2] and "request_id='c'" in shown[1][2]


def test_the_commands_report_a_truncated_log(log, capsys):
    log.write_bytes(log.read_bytes()[:-9])
    for command in ("replay", "show"):
        assert main(["lab", command, str(log)]) == 0
        assert "truncated" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["replay", "show"])
def test_the_commands_reject_a_file_that_is_not_a_decision_log(command, tmp_path, capsys):
    path = tmp_path / "else.txt"
    path.write_text("hello\n")
    assert main(["lab", command, str(path)]) == 2
    output = capsys.readouterr()
    assert not output.out and "it begins with b'hello'" in " ".join(output.err.split())
    path.write_text("")
    assert main(["lab", command, str(path)]) == 2
    assert "it is empty." in " ".join(capsys.readouterr().err.split())


def test_the_show_command_prints_a_summary_of_the_log(log, capsys):
    assert main(["lab", "show", str(log)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line[:11].strip(): line[11:].strip() for line in lines}
    assert rows["scheduler"] == SCHEDULER
    assert rows["steps"] == "5, 0 without tokens" and rows["time"] == "0.010 s"
    assert rows["requests"] == "3, 1 aborted"
    assert rows["grants"] == "8, 1.6 per step"
    assert rows["tokens"] == "16 computed, 8 sampled"
    assert rows["preemptions"].startswith("0")
    assert rows["prefix hits"] == "26.7% (4 of 15 prompt tokens)"
    assert rows["size"].endswith("per step")


def test_the_show_command_prints_each_step_as_json(log, capsys):
    assert main(["lab", "show", "--steps", str(log)]) == 0
    first, *_, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["step_id"] == 0 and first["now_ns"] == 9 * MS and last["step_id"] == 4
    assert first["joins"] == [["a", 0], ["b", 1]] and first["num_tokens"] == [5, 5]
    assert last["rows"] == [1] and "joins" not in last


MINE = """
from dovetail.interfaces import Policy
from dovetail.scheduling import Scheduler

class Mine(Policy):
    def rank(self, request, view):
        return -len(request.request_id), request.sequence

class MyScheduler(Scheduler):
    pass
"""


@pytest.fixture
def local(tmp_path, monkeypatch):
    """Return a function that records a log of an engine with a scheduler or policy in ./mine.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    options = {
        "platform": "dovetail_devkit.fakes.platform:FakePlatform",
        "worker_cls": "dovetail_devkit.fakes.worker:FakeWorker",
        "skip_tokenizer_init": True,
        "trust_local_code": True,
        "decision_log": tmp_path / "local.log",
    }

    def run(scheduler_cls):
        (tmp_path / "model").mkdir()
        model = write_fake_config(tmp_path / "model")
        with LLM(model, **{**SMALL_ENGINE, **options, "scheduler_cls": scheduler_cls}) as llm:
            llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=3), use_tqdm=False)
        return str(options["decision_log"])

    return run


@pytest.mark.parametrize("name", ["Mine", "MyScheduler"])
def test_the_replay_command_runs_a_recorded_class_from_a_file_only_if_trusted(
    name, local, capsys, monkeypatch
):
    log = local(f"./mine.py:{name}")
    assert main(["lab", "replay", log]) == 2
    output = capsys.readouterr().err
    assert f"mine.py:{name}" in output and "--trust-local-code" in output
    monkeypatch.chdir("/")  # the log contains the absolute path
    assert main(["lab", "replay", log, "--trust-local-code"]) == 0
    assert "byte for byte" in capsys.readouterr().out


def test_the_replay_command_runs_another_scheduler_from_a_file_only_if_trusted(local, capsys):
    log = local("./mine.py:Mine")
    assert main(["lab", "replay", log, "--scheduler", "./mine.py:Mine"]) == 2
    assert "--trust-local-code" in capsys.readouterr().err
    trusted = ["lab", "replay", log, "--trust-local-code"]
    assert main([*trusted, "--scheduler", "./mine.py:Mine"]) == 0
    assert "byte for byte" in capsys.readouterr().out
    assert main([*trusted, "--scheduler", "./mine.py:Gone"]) == 2
    assert "Classes in the module: Mine, MyScheduler" in capsys.readouterr().err


@pytest.mark.costly
@pytest.mark.parametrize(
    "command",
    [
        ["lab", "replay"],
        ["plugins", "show"],
        ["plugins", "explain"],
        ["demo"],
        ["generate"],
        ["chat"],
        ["bench", "latency"],
    ],
    ids=" ".join,
)
def test_every_command_that_loads_classes_has_the_trust_local_code_option(command, capsys):
    assert main([*command, "--help-all"]) == 0
    assert "--trust-local-code" in capsys.readouterr().out
