"""`dovetail trace`: traces of decision logs and servers, and errors for other files."""

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
import zlib
from collections import Counter
from itertools import pairwise

import pytest

from dovetail.cli.app import main
from dovetail.clock import MonotonicClock
from dovetail.decision_log import LogReader, RecordKind, log_file
from dovetail.errors import UserError
from dovetail_client_tools.engine_steps.reader import StepsReader
from dovetail_client_tools.engine_steps.records import Step
from dovetail_client_tools.trace import log_steps, server_steps, slices, viewer
from dovetail_client_tools.trace.slices import Ended, Slice, TraceBuilder
from dovetail_lab.summary import summarize

ENGINE, REQUESTS, COUNTERS = 1, 2, 3
LATER_NS = 10**13
"""More than the longest duration of a trace."""
LAB_RUN = ("lab", "run", "fcfs", "--trace", "chat", "--requests", "60", "--load", "1.5")


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Return a decision log of a simulated run, and the lab's own trace of the run."""
    folder = tmp_path_factory.mktemp("log")
    paths = ("--decision-log", folder / "run.log", "--perfetto", folder / "lab.json")
    assert main([str(word) for word in (*LAB_RUN, *paths)]) == 0
    return folder / "run.log"


def events(path):
    return json.loads(path.read_text())["traceEvents"]


def named(events, group, phase="X"):
    return [event for event in events if event["pid"] == group and event["ph"] == phase]


def page_data(path):
    text = path.read_text()
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(block[1])


class Sink:
    def __init__(self):
        self.requests, self.slices, self.ends, self.lanes = [], [], [], []

    def add_request(self, number, name, num_prompt):
        self.requests.append((number, name, num_prompt))

    def add_slice(self, item):
        self.slices.append(item)

    def add_ended(self, item):
        self.ends.append(item)

    def add_step(self, step, lane):
        self.lanes.append(lane)


def built(*steps):
    sink = Sink()
    builder = TraceBuilder([sink], lambda number: f"r{number}")
    for step in steps:
        builder.add(step)
    builder.end()
    return sink


def step(number, **fields):
    times = {"begin_ns": 10 * number, "end_ns": 10 * number + 8}
    base = {"number": number, "step_id": number, "num_tokens": 1, "num_new_tokens": 0}
    return Step(**base | times | fields)


def test_steps_are_merged_into_slices():
    sink = built(
        step(1, joined=((1, 9, 9),), prefills=((1, 4, 3),)),
        step(2, prefills=((1, 7, 2),)),
        step(3, decodes=(1, 2)),
        step(4, decodes=None),
        step(5, decodes=(2,), preempted=(1,)),
        step(6, decodes=(2,), joined=((1, 9, 11),), prefills=((1, 0, 11),)),
        step(7, decodes=(1,), ended=((2, "stop"),)),
    )
    assert sink.requests == [(1, "r1", 9), (2, "r2", None)]
    assert sorted(sink.slices) == sorted([
        Slice(1, "prefill", 10, 18, 1, 3),
        Slice(1, "prefill", 20, 28, 1, 2),
        Slice(1, "decode", 30, 48, 2, 2),
        Slice(1, "preempted", 48, 60),
        Slice(1, "prefill", 60, 68, 1, 11),
        Slice(1, "decode", 70, 78, 1, 1),
        Slice(2, "decode", 30, 68, 4, 4),
    ])  # fmt: skip
    assert sink.ends == [Ended(2, "stop", 68)]


def test_steps_that_overlap_are_in_different_lanes():
    times = [(0, 10), (5, 15), (10, 20), (15, 25), (40, 30)]
    steps = [step(index, begin_ns=begin, end_ns=end) for index, (begin, end) in enumerate(times)]
    assert built(*steps).lanes == [0, 1, 0, 1, 0]


def test_the_trace_of_a_log_agrees_with_the_simulator(run, log, tmp_path):
    path = tmp_path / "trace.json"
    code, text, _ = run("trace", log, "--perfetto", path)
    assert code == 0 and "Open it at https://ui.perfetto.dev" in text
    ours, lab = events(path), events(log.with_name("lab.json"))
    tokens = [
        sum(event["args"]["prefill_tokens"] + event["args"]["decode_tokens"] for event in steps)
        for steps in (named(ours, ENGINE), named(lab, ENGINE))
    ]
    assert tokens[0] == tokens[1] > 10_000
    names = [
        {e["tid"]: e["args"]["name"] for e in named(item, REQUESTS, "M") if "tid" in e}
        for item in (ours, lab)
    ]
    assert sorted(names[0].values()) == sorted(names[1].values())
    begin = [min(e["ts"] for e in named(item, REQUESTS)) for item in (ours, lab)]
    ends = [Counter(), Counter()]
    for item, name, first, result in zip((ours, lab), names, begin, ends, strict=True):
        for event in named(item, REQUESTS):
            end = (event["ts"] + event["dur"] - first) / 1e6
            result[name[event["tid"]]] = max(result[name[event["tid"]]], end)
    for request, end in ends[0].items():
        assert end == pytest.approx(ends[1][request], abs=0.2), request
    peaks = [max(e["args"]["value"] for e in named(ours, COUNTERS, "C") if name in e["name"])
             for name in ("running", "blocks")]  # fmt: skip
    assert 1 < peaks[0] <= 256 and 1 < peaks[1] < 8192


def test_slices_of_a_request_and_steps_of_a_lane_do_not_overlap(run, log, tmp_path):
    path = tmp_path / "trace.json"
    assert run("trace", log, "--perfetto", path)[0] == 0
    for group in (ENGINE, REQUESTS):
        tracks = {}
        for event in named(events(path), group):
            tracks.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
        for track in tracks.values():
            assert all(one[1] <= two[0] + 0.002 for one, two in pairwise(sorted(track)))


def test_a_page_is_self_contained_and_escapes_names(run, log, tmp_path):
    path = tmp_path / "<script>alert(1)</script>@@DATA@@.log".replace("/", "_")
    path.write_bytes(log.read_bytes())
    page = tmp_path / "page.html"
    code, text, _ = run("trace", path, "--html", page)
    assert code == 0 and "Open it in a browser" in text
    text = page.read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.findall(r"https?://", text) and "<script>alert" not in text
    assert text.count("<script") == 2 and text.count('"kinds"') == 1
    data = page_data(page)
    assert len(data["requests"]) == 60 and len(data["steps"]["begin"]) > 100
    assert {len(column) for column in data["steps"].values()} == {len(data["steps"]["lane"])}


def test_a_page_has_only_the_selected_steps_and_says_what_is_missing(
    run, log, tmp_path, monkeypatch
):
    page = tmp_path / "page.html"
    assert run("trace", log, "--html", page, "--steps", "20:50")[0] == 0
    assert page_data(page)["steps"]["step_id"] == list(range(20, 50))
    monkeypatch.setattr(viewer, "MAX_STEPS", 10)
    monkeypatch.setattr(viewer, "MAX_SLICES", 15)
    monkeypatch.setattr(viewer, "MAX_REQUESTS", 5)
    code, text, _ = run("trace", log, "--html", page)
    data = page_data(page)
    assert (
        code == 0 and "shows the first 10 of" in text and "shows the first 10" in page.read_text()
    )
    assert len(data["steps"]["begin"]) == 10 and len(data["slices"]["begin"]) <= 15
    assert len(data["requests"]) == 5


def test_memory_does_not_grow_with_the_length_of_a_log(run, log, monkeypatch):
    monkeypatch.setattr(slices, "MAX_LEFT", 3)
    monkeypatch.setattr(log_steps, "MAX_LEFT", 3)
    steps = log_steps.LogSteps((0, 10**9))

    summarize(LogReader(log), steps)
    steps.end()
    num_rows = len(steps._rows)
    assert num_rows < 10 and len(steps._left) == 3 and not steps._arrivals
    assert len(steps._numbers) <= 3 + num_rows and len(steps.builder._left) == 3
    in_use = {block for row in steps._rows.values() for block in row.block_ids}
    assert set(steps._users) == in_use


@pytest.mark.parametrize("part", [0.1, 0.5, 0.99])
def test_a_truncated_log_gives_the_trace_of_its_complete_records(run, log, tmp_path, part):
    cut = tmp_path / "cut.log"
    content = log.read_bytes()
    cut.write_bytes(content[: int(len(content) * part)])
    page = tmp_path / "page.html"
    code, text, _ = run("trace", cut, "--html", page)
    assert (
        code == 0 and "The log is truncated" in text and "The log is truncated" in page.read_text()
    )
    assert page_data(page)["steps"]["begin"]


def frame(kind, payload):
    body = zlib.compress(payload)
    return log_file._FRAME.pack(kind, len(body), zlib.crc32(body)) + body


@pytest.mark.costly
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda log: b"", "not a decision log"),
        (lambda log: b"GIF89a" * 100, "not a decision log"),
        (lambda log: b"dovetail decisions 1\n", "has no header"),
        (lambda log: log[:2000] + b"x" + log[2001:], "is damaged at byte"),
        (lambda log: log + frame(RecordKind.PLAN, b""), "cannot be decoded"),
        (lambda log: log + frame(RecordKind.ADD, b"\x00" * 4 + b"[" * 10**6), "cannot be decoded"),
        (lambda log: log + frame(RecordKind.ADD, b"\x00" * 4 + b"[]"), "cannot be decoded"),
        (lambda log: log + frame(RecordKind.OUTPUT, b"\xff" * 50), "cannot be decoded"),
        (lambda log: log + frame(RecordKind.ADD, b"\x00" * 2**22), "more than 1,048,576 bytes"),
    ],
)
def test_a_file_that_is_not_a_decision_log_gives_a_clear_error_and_no_output(
    run, log, tmp_path, monkeypatch, change, message
):
    monkeypatch.setattr(log_file, "MAX_PAYLOAD_BYTES", 1 << 20)
    path = tmp_path / "bad.log"
    path.write_bytes(change(log.read_bytes()))
    words = ("--html", tmp_path / "page.html", "--perfetto", tmp_path / "trace.json")
    code, text, messages = run("trace", path, *words)
    assert code == 2 and not text and message in messages and "bad.log" in messages
    assert [item.name for item in tmp_path.iterdir()] == ["bad.log"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "either a decision log or --url"),
        (("a.log", "--url", "x"), "either a decision log or --url"),
        (("a.log",), "Use --html FILE"),
        (("a.log", "--html", "none/page.html"), "--html none/page.html is in a directory"),
        (("a.log", "--html", "x", "--perfetto", "x"), "must be different files"),
        (("a.log", "--html", "x", "--steps", "9"), "must be FROM:TO"),
        (("a.log", "--html", "x", "--steps", "9:3"), "must be FROM:TO"),
        (("a.log", "--html", "x"), "cannot be read: No such file"),
        (("--url", "x", "--html", "x", "--steps", "1:2"), "with --url, use --duration-s"),
        (("--url", "x", "--html", "x", "--duration-s", "nan"), "--duration-s nan must be"),
        (("--url", "127.0.0.1:9", "--html", "x"), "cannot be reached"),
    ],
)
def test_invalid_options_give_clear_errors(run, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text, messages = run("trace", *words)
    assert code == 2 and not text and message in " ".join(messages.split())
    assert not list(tmp_path.iterdir())


def test_the_steps_of_a_server_are_traced(run, null, steps, tmp_path):
    paths = tmp_path / "page.html", tmp_path / "trace.json"
    with null.running(steps.respond) as url:
        words = ("--url", url, "--duration-s", 1, "--html", paths[0], "--perfetto", paths[1])
        code, text, _ = run("trace", *words)
    assert code == 0 and "missing" not in text
    numbers = page_data(paths[0])["steps"]["step_id"]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) and len(numbers) > 15
    decodes = [event for event in named(events(paths[1]), REQUESTS) if event["name"] == "decode"]
    assert len(decodes) == 256 and {event["args"]["steps"] for event in decodes} == {len(numbers)}


def test_a_trace_contains_the_steps_until_the_server_restarts_or_exits(
    run, null, steps, tmp_path, monkeypatch
):
    monkeypatch.setattr(server_steps, "PERIOD_S", 0.05)
    answers = Counter()

    def respond(path, body):
        answers["steps"] += 1
        if answers["steps"] == 4:
            steps.started_ns = time.monotonic_ns()
        return steps.respond(path, body)

    page = tmp_path / "page.html"
    with null.running(respond) as url:
        code, text, _ = run("trace", "--url", url, "--duration-s", 5, "--html", page)
    assert code == 0 and "was restarted" in text and page_data(page)["kinds"]
    answers.clear()
    steps.started_ns -= 10**10

    def fail(path, body):
        answers["steps"] += 1
        if answers["steps"] > 3:
            steps.status, steps.body = "503 No", b'{"error": {"message": "\\u001b[2Jdraining"}}'
        return steps.respond(path, body)

    with null.running(fail) as url:
        code, text, _ = run("trace", "--url", url, "--duration-s", 5, "--html", page)
    assert code == 0 and "503: ?[2Jdraining" in text and "\x1b" not in text + page.read_text()


def test_steps_whose_numbers_do_not_increase_end_the_trace(run, null, tmp_path):
    trace = {"started_ns": 1, "now_ns": 1, "after": 0, "num_steps": 2**53}
    invalid = {"number": 0, "step_id": 1, "begin_ns": 9, "end_ns": 1}
    trace["steps"] = [invalid | {"num_tokens": 1, "num_new_tokens": 0}] * 3
    content = null.whole(json.dumps(trace).encode(), "application/json")
    with null.running(lambda path, body: content) as url:
        words = ("--url", url, "--duration-s", 0.2, "--html", tmp_path / "page.html")
        code, text, _ = run("trace", *words)
    assert code == 0 and "executed no steps" in text
    with pytest.raises(UserError):
        LogReader(tmp_path / "page.html")


@pytest.fixture
def requests_during_trace(monkeypatch):
    """Return a function that sends requests while the next trace of a server is recorded.

    The requests start after the first read of the trace, and the trace ends after the last
    response, however long this takes.
    """
    real_read = StepsReader.read
    results = []

    def prepare(send, count):
        def run():
            results.extend(send() for _ in range(count))

        thread = threading.Thread(target=run)

        async def read(self, *args):
            trace = await real_read(self, *args)
            if not thread.ident:
                thread.start()
            return trace

        def now_ns(self):
            has_ended = thread.ident is not None and not thread.is_alive()
            return time.monotonic_ns() + has_ended * LATER_NS

        monkeypatch.setattr(StepsReader, "read", read)
        monkeypatch.setattr(MonotonicClock, "now_ns", now_ns)
        return results

    yield prepare
    monkeypatch.undo()


def complete(url):
    body = {"prompt": "Anna and Ben", "max_tokens": 20, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    request = urllib.request.Request(
        f"http://{url}/v1/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.status


@pytest.mark.costly
def test_a_server_with_a_key_is_shown_and_traced(run, tmp_path, requests_during_trace):
    program = "import sys; from dovetail.cli.app import main; sys.exit(main())"
    options = ["--model", "demo", "--port", "0", "--api-key", "secret"]
    key = tmp_path / "key"
    key.write_text("secret\n")
    command = [sys.executable, "-c", program, "serve", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            ready = (re.search(r"http://(\S+?)/v1", line) for line in process.stderr)
            url = next(filter(None, ready))[1]
            code, _, messages = run("top", "--url", url, "--once")
            assert code == 2 and "401" in messages and "--api-key-file" in messages
            known = ("--url", url, "--api-key-file", key)
            page = tmp_path / "page.html"
            statuses = requests_during_trace(lambda: complete(url), 4)
            code, _, messages = run("trace", *known, "--duration-s", 3600, "--html", page)
            assert code == 0 and statuses == [200] * 4, messages
            data = page_data(page)
            assert {row[3] for row in data["requests"]} == {"length"}
            assert [row[2] > 1 for row in data["requests"]] == [True] * 4
            tokens = Counter()
            columns = (data["slices"][name] for name in ("request", "kind", "tokens"))
            for number, kind, count in zip(*columns, strict=True):
                tokens[number, data["kinds"][kind]] += count
            assert [tokens[number, "decode"] for number, *_ in data["requests"]] == [19] * 4
            code, text, _ = run("top", *known, "--once", "--interval-s", 0.2)
            assert code == 0 and "policy FCFSPolicy" in text and "running 0" in text
        finally:
            process.terminate()
