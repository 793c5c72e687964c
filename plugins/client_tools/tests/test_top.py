"""`dovetail top`: shows a server, and handles everything that is not a server."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import fields

import pytest

from dovetail.engine.step_trace import records as core_records
from dovetail.interfaces.scheduler import SchedulerStats
from dovetail_client_tools.engine_steps import reader, records
from dovetail_client_tools.engine_steps.reader import ServerNames
from dovetail_client_tools.top import engine_view
from dovetail_client_tools.top.engine_view import EngineView
from dovetail_client_tools.top.frame import Picture, draw

MAIN = "import sys; from dovetail.cli.app import main; sys.exit(main())"
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eabc" + "x" * 5000
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


def decoded(**fields):
    base = {"started_ns": 1, "now_ns": 10**9, "after": 0, "num_steps": 0}
    return reader._STEPS.decode(json.dumps(base | fields).encode())


def step(number, **fields):
    base = {"number": number, "step_id": number, "begin_ns": number * 10**7, "num_new_tokens": 0}
    return base | {"end_ns": number * 10**7 + 10**6, "num_tokens": 1} | fields


def picture(view, **more):
    return Picture(names=ServerNames("http://x", "m"), view=view, **more)


def test_the_parsed_fields_are_those_that_the_engine_sends():
    for ours, core in (
        (records.Step, core_records.StepRecord),
        (records.Steps, core_records.StepTrace),
        (records.Stats, SchedulerStats),
    ):
        assert set(ours.__struct_fields__) <= {field.name for field in fields(core)}


def test_the_state_of_a_server_is_printed(run, null, steps):
    with null.running(steps.respond) as url:
        code, text, _ = run("top", "--url", url, "--once", "--interval-s", 0.3)
    assert code == 0
    assert f"dovetail top  {url}  null  policy FCFSPolicy" in text
    assert "running 256   waiting 3" in text and "KV cache 34.5 %" in text
    assert "prefix hits 25.0 %   preemptions 2" in text
    assert re.search(r"^ +1 +decode +\d+ +64 +[\d.]+ +0  █▪+$", text, re.MULTILINE), text


def test_the_state_of_a_server_is_printed_as_json(run, null, steps):
    with null.running(steps.respond) as url:
        code, text, _ = run("top", "--url", url, "--once", "--json", "--interval-s", 0.5)
    figures = json.loads(text)
    assert code == 0 and figures["num_running"] == len(figures["requests"]) == 256
    assert figures["requests"][0]["num_prompt"] == 64
    assert figures["new_tokens_per_s"] == pytest.approx(256 * 25, rel=0.2)
    assert figures["steps"][0]["num_prefill_tokens"] == 64 * 256


@pytest.fixture
def start():
    """Start `dovetail top` in a process, which is killed at the end if it still runs."""
    processes = []

    def call(*words, **options):
        command = [sys.executable, "-c", MAIN, "top", *words]
        processes.append(subprocess.Popen(command, **options))
        return processes[-1]

    yield call
    for process in processes:
        process.kill()
        process.wait(20)


def test_a_pipe_gets_one_line_per_interval_while_the_server_restarts(null, steps, start):
    with null.running(steps.respond) as url:
        words = ("--interval-s", "0.2", "--url", url)
        process = start(*words, stdout=subprocess.PIPE, text=True)
        lines = iter(process.stdout.readline, "")
        assert "running 256" in next(lines)
        steps.status, steps.body = "503 Service Unavailable", b'{"error": {"message": "loading"}}'
        assert next(line for line in lines if "responded with 503: loading" in line)
        steps.status, steps.body = "200 OK", None
        steps.started_ns = time.monotonic_ns()  # the engine has started again
        assert next(line for line in lines if "running 256" in line)
    assert next(line for line in lines if "cannot be reached" in line)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 0


def test_a_restart_removes_the_earlier_requests():
    view = EngineView()
    first = step(1, joined=[[7, 5, 5]], prefills=[[7, 0, 5]])
    view.add(decoded(started_ns=1, num_steps=1, steps=[first]))
    assert list(view.requests) == [7] and view.after == 1
    view.add(decoded(started_ns=2, num_steps=0, num_new_tokens=0))
    assert not view.requests and view.after == 0 and view.num_restarts == 1
    assert view.rates() is None


def test_each_request_shows_its_tokens_and_its_state():
    view = EngineView()
    steps = [
        step(1, joined=[[1, 8, 8], [2, 4, 4]], prefills=[[1, 2, 3], [2, 0, 4]]),
        step(2, prefills=[[1, 5, 3]], decodes=[2]),
        step(3, decodes=[2, 1]),
        step(4, decodes=None, ended=[[2, "stop"]]),
        step(5, decodes=[], preempted=[1]),
    ]
    view.add(decoded(num_steps=5, steps=steps))
    one, two = view.requests[1], view.requests[2]
    assert (one.num_prompt, one.num_cached, one.num_output, one.state) == (8, 2, 3, "preempted")
    assert (two.num_cached, two.num_output, two.state, two.reason) == (0, 4, "ended", "stop")
    lines = draw(picture(view), 100, 30).plain.splitlines()
    assert lines[-2].endswith("██▪▪!") and lines[-1].endswith("█▪▪■·")


@pytest.mark.parametrize("width", [1, 10, 20, 40, 60, 80, 200, 10_000])
def test_the_display_fits_into_the_terminal(steps, width):
    view = EngineView()
    view.add(decoded(**steps.trace(0, 1024)))
    for height in (1, 5, 24):
        text = draw(picture(view, problem="x " * 300), width, height)
        lines = text.split("\n", allow_blank=True)
        assert len(lines) <= height
        assert all(line.cell_len <= width for line in lines)


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_strings_sent_by_the_server_cannot_control_the_terminal(
    run, null, steps, monkeypatch, arguments
):
    steps.stats = {"policy": HOSTILE[:200]}
    models = {"data": [{"id": HOSTILE}]}
    monkeypatch.setattr(null, "MODELS", json.dumps(models).encode())
    with null.running(steps.respond) as url:
        words = ("top", "--url", url, "--once", "--interval-s", 0.2, *arguments)
        code, text, messages = run(*words)
        assert code == 0 and "abc" in text and not CONTROL.search(text + messages)
        assert len(text) < 100_000
        error = {"error": {"message": HOSTILE, "code": HOSTILE}}
        steps.status, steps.body = "500 No", json.dumps(error).encode()
        code, text, messages = run(*words)
    assert code == 2 and not CONTROL.search(text + messages) and len(messages) < 1000


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        ("401 No", b'{"error": {"message": "wrong key"}}', "--api-key-file"),
        ("403 No", b'{"error": {"message": "host not allowed"}}', "403: host not allowed"),
        ("404 No", b'{"error": {"code": "unknown_route"}}', "has no route /steps. Update"),
        ("404 No", b'{"detail": "Not Found"}', "is not a Dovetail server: it has no route /steps"),
        ("404 No", b"<html>", "is not a Dovetail server"),
        ("200 OK", b"<html>", "is not a Dovetail server: the content"),
        ("200 OK", b"[" * 100_000, "is not a Dovetail server: the content"),
        ("200 OK", b'{"started_ns": -1}', "is not a Dovetail server: the content"),
        (
            "200 OK",
            b"x" * (9 << 20),
            "is not a Dovetail server: its response is not valid HTTP, or is too large",
        ),
        ("503 No", b'{"error": {"message": "loading"}}', "503: loading"),
        ("502 Bad", b"", "responded with 502: no message"),
    ],
)
def test_a_response_from_another_kind_of_server_gives_a_clear_error(
    run, null, steps, status, body, message
):
    steps.status, steps.body = status, body
    with null.running(steps.respond) as url:
        code, text, messages = run("top", "--url", url, "--once", "--interval-s", 0.2)
    assert code == 2 and not text and message in messages and url in messages
    assert "Traceback" not in messages


def test_a_server_that_does_not_exist_gives_a_clear_error(run, monkeypatch):
    code, _, messages = run("top", "--url", "http://127.0.0.1:9")
    assert code == 2 and "cannot be reached: Connection refused" in messages
    code, _, messages = run("top", "--interval-s", "nan")
    assert code == 2 and "--interval-s nan must be between" in messages


def test_the_view_is_limited_for_hostile_numbers_and_many_requests(monkeypatch):
    monkeypatch.setattr(engine_view, "MAX_REQUESTS", 100)
    view = EngineView()
    for first in range(0, 1000, 50):
        joined = [[first + i, 1, 1] for i in range(50)]
        ended = [[first + i, "stop"] for i in range(0, 50, 2)]
        view.add(decoded(num_steps=1, steps=[step(1, joined=joined, ended=ended)]))
        assert len(view.requests) <= 100
    big = 2**53
    view.add(decoded(num_steps=big, steps=[step(big, begin_ns=big, end_ns=0, decodes=[big] * 9)]))
    assert draw(picture(view), 80, 24).plain
    with pytest.raises(Exception, match="Expected `int` <= 9007199254740992"):
        decoded(num_steps=10**400)


class Terminal:
    """A `dovetail top` process on a pseudo terminal; `output` is what it has written."""

    def __init__(self, start, *words):
        self.fd, other = pty.openpty()
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
        self.process = start(*words, stdin=other, stdout=other, stderr=other, env=environment)
        os.close(other)
        self.output = b""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        try:
            while part := os.read(self.fd, 1 << 16):
                self.output += part
        except OSError:
            pass  # the process has ended

    def wait_for(self, text, limit_s=30):
        deadline_s = time.monotonic() + limit_s
        while text not in self.output:
            assert time.monotonic() < deadline_s, self.output[-3000:]
            time.sleep(0.05)

    def cpu_s(self):
        with open(f"/proc/{self.process.pid}/stat") as file:
            values = file.read().rpartition(")")[2].split()
        return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")

    def end(self):
        code = self.process.wait(20)
        self._thread.join()
        os.close(self.fd)
        return code


def test_pressing_q_ends_the_display_and_restores_the_terminal(null, steps, start):
    with null.running(steps.respond) as url:
        terminal = Terminal(start, "--url", url, "--interval-s", "0.2")
        terminal.wait_for(b"FCFSPolicy")
        os.write(terminal.fd, b"q")
        assert terminal.end() == 0
    assert terminal.output.startswith(b"\x1b[?1049h")  # the second screen of the terminal
    assert terminal.output.endswith(b"\x1b[?25h\x1b[?1049l")  # the cursor and the first screen


@pytest.mark.costly
@pytest.mark.clock
def test_the_display_uses_at_most_two_percent_of_a_core(null, steps, start):
    with null.running(steps.respond) as url:
        terminal = Terminal(start, "--url", url)
        terminal.wait_for(b"FCFSPolicy")
        time.sleep(2)
        begin_s, used_s = time.monotonic(), terminal.cpu_s()
        time.sleep(8)
        share = (terminal.cpu_s() - used_s) / (time.monotonic() - begin_s)
        os.write(terminal.fd, b"q")
        assert terminal.end() == 0
    assert share <= 0.02, f"{share:.2%}"
