"""The recording of function calls."""

import threading

import pytest

from dovetail.clock import MonotonicClock
from dovetail.errors import ConfigError, nearest
from dovetail_server.observability import function_trace
from dovetail_server.observability.function_trace import FunctionTrace


def lines_of(path):
    return [line.split() for line in path.read_text("utf-8").splitlines()]


def test_function_calls_in_every_thread_are_recorded(tmp_path):
    trace = FunctionTrace(str(tmp_path / "calls"), MonotonicClock())
    try:
        nearest("a", ["a"])
        thread = threading.Thread(target=nearest, args=("b", ["b"]), name="other-thread")
        thread.start()
        thread.join()
    finally:
        trace.stop()
    nearest("c", ["c"])
    lines = lines_of(tmp_path / "calls")
    calls = [line[1:] for line in lines if line[3] == "dovetail.errors.nearest"]
    threads = [call[0] for call in calls]
    assert threads == ["MainThread", "MainThread", "other-thread", "other-thread"]
    assert [call[1] for call in calls] == ["call", "return"] * 2
    times = [int(line[0]) for line in lines]
    assert times == sorted(times)
    assert {line[3].partition(".")[0] for line in lines} <= {"dovetail", "dovetail_server"}


def test_the_number_of_lines_of_the_trace_file_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(function_trace, "MAX_LINES", 5)
    trace = FunctionTrace(str(tmp_path / "calls"), MonotonicClock())
    try:
        for _ in range(10):
            nearest("a", ["a"])
    finally:
        trace.stop()
    assert len(lines_of(tmp_path / "calls")) == 5


def test_a_trace_file_that_cannot_be_written_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="--trace-functions"):
        FunctionTrace(str(tmp_path / "absent" / "calls"), MonotonicClock())


@pytest.mark.costly
def test_a_server_with_the_option_records_its_function_calls(serving, tmp_path):
    file = tmp_path / "calls"
    options = ("--model", "demo", "--max-model-len", "64", "--trace-functions", str(file))
    with serving(*options) as running:
        assert running.wait_until_ready().complete(prompt="x").status == 200
    assert any("GenerationRoutes.complete" in line[-1] for line in lines_of(file))


@pytest.mark.costly
def test_streamed_tokens_are_written_without_a_switch_to_the_task_of_the_request(serving, tmp_path):
    file = tmp_path / "calls"
    options = ("--model", "demo", "--max-model-len", "128", "--trace-functions", str(file))
    fields = {"prompt": "a", "max_tokens": 60, "ignore_eos": True}
    with serving(*options) as running:
        events = running.wait_until_ready().complete(**fields, stream=True).events
        whole = running.complete(**fields).json["choices"][0]["text"]
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == whole
    calls = [line[-1] for line in lines_of(file) if line[-2] == "call"]
    num_direct = sum(call.endswith("Exchange.write_now") for call in calls)
    num_switched = sum(call.endswith("Exchange.write") for call in calls)
    assert num_direct > num_switched


@pytest.mark.parametrize("path", ["a\0b", "x" * 300])
def test_a_path_that_cannot_exist_is_rejected(path):
    with pytest.raises(ConfigError, match=r"--trace-functions .* cannot be written"):
        FunctionTrace(path, MonotonicClock())
