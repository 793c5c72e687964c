"""`dovetail lab replay` and `dovetail lab show`, as they are typed."""

import json
from array import array

import pytest

from dovetail.cli import main
from dovetail.clock import ManualClock
from dovetail.decision_log import DecisionRecorder, RecordedScheduler
from dovetail.interfaces import SchedulerContext, SchedulerLimits
from dovetail.request import EngineCoreRequest
from dovetail.result import ModelRunnerOutput
from dovetail.sampling_params import SamplingParams
from dovetail.testing.random_programs import make_kv_cache
from dovetail_sched_fcfs import FCFSScheduler

MS = 1_000_000


@pytest.fixture
def log(tmp_path):
    """Three requests on two seats, five steps of 2 ms; the last of them is the most urgent."""
    clock, path = ManualClock(7 * MS), tmp_path / "run.log"
    context = SchedulerContext(
        limits=SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32),
        kv_cache=make_kv_cache(num_blocks=33, block_size=4),
        clock=clock,
    )
    recorder = DecisionRecorder(path, FCFSScheduler, context)
    scheduler = RecordedScheduler(FCFSScheduler(recorder.context), recorder)
    for number, name in enumerate("abc"):
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=array("i", [1, 2, 3, 4, 5]),
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


def test_a_log_is_verified(log, capsys):
    assert main(["lab", "replay", str(log)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("dovetail_sched_fcfs:FCFSScheduler: 5 steps of 3 requests, 0.010 s of")
    assert "steps/s" in told and "Every plan is the same, byte for byte." in told


def test_the_first_difference_is_shown_with_both_sides(log, capsys):
    assert main(["lab", "replay", str(log), "--scheduler", "priority"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("priority: 0 steps") and "Step 0 is the first" in lines[1]
    shown = [line.split(maxsplit=2) for line in lines[2:]]
    assert [row[:2] for row in shown] == [["joins", "log"], ["joins", "replay"]]
    assert "request_id='a'" in shown[0][2] and "request_id='c'" in shown[1][2]


def test_a_log_that_is_cut_off_is_told(log, capsys):
    log.write_bytes(log.read_bytes()[:-9])
    for command in ("replay", "show"):
        assert main(["lab", command, str(log)]) == 0
        assert "cut off" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["replay", "show"])
def test_what_is_no_log_is_a_mistake_of_the_user(command, tmp_path, capsys):
    path = tmp_path / "else.txt"
    path.write_text("hello\n")
    assert main(["lab", command, str(path)]) == 2
    told = capsys.readouterr()
    assert not told.out and "is no decision log" in told.err


def test_a_log_is_summed_up(log, capsys):
    assert main(["lab", "show", str(log)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line[:11].strip(): line[11:].strip() for line in lines}
    assert rows["scheduler"] == "dovetail_sched_fcfs:FCFSScheduler"
    assert rows["steps"] == "5, 0 of them empty" and rows["time"] == "0.010 s"
    assert rows["requests"] == "3, 1 of them aborted"
    assert rows["grants"] == "8, 1.6 a step"
    assert rows["tokens"] == "16 computed, 8 sampled"
    assert rows["preemptions"].startswith("0")
    assert rows["prefix hits"] == "26.7% (4 of 15 prompt tokens)"
    assert rows["size"].endswith("a step")


def test_steps_are_shown_as_json(log, capsys):
    assert main(["lab", "show", "--steps", str(log)]) == 0
    first, *_, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["step_id"] == 0 and first["now_ns"] == 9 * MS and last["step_id"] == 4
    assert first["joins"] == [["a", 0], ["b", 1]] and first["num_tokens"] == [5, 5]
    assert last["rows"] == [1] and "joins" not in last
