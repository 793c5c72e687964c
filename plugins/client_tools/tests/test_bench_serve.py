"""`dovetail bench serve`: loads, measured times, and servers with invalid responses."""

import asyncio
import itertools
import json
import random
import re

import pytest

from dovetail_client_tools.load.load_request import NS, sample_arrivals
from dovetail_client_tools.load.load_run import LoadRecord, RequestTimes
from dovetail_client_tools.load.point import percentile, summarize
from dovetail_client_tools.load.prompts import PromptWriter, TokenScale, measured_scale

SMALL = ("--input-len", "8", "--output-len", "4")


@pytest.fixture
def bench(run, null, tmp_path):
    """Run the command against a fake server. Return exit code, parsed results and messages."""

    def call(respond, *options):
        path = tmp_path / "result.json"
        with null.running(respond) as url:
            code, out, err = run("bench", "serve", "--url", url, "--json", path, *SMALL, *options)
        return code, json.loads(path.read_text()) if path.exists() else None, out + err

    return call


class Recorder:
    """Responds like a server that streams; records bodies, and requests in flight."""

    def __init__(self, null, *, first_s=0.0, gap_s=0.0):
        self.null, self.first_s, self.gap_s = null, first_s, gap_s
        self.bodies, self.in_flight, self.peak = [], 0, 0

    def __call__(self, path, body):
        fields = json.loads(body)
        self.bodies.append((path, fields))
        return self._stream(fields["max_tokens"])

    async def _stream(self, num_tokens):
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        content = self.null.events(num_tokens)
        parts = [f"{part}\n\n".encode() for part in content.decode().split("\n\n") if part]
        await asyncio.sleep(self.first_s)
        yield self.null.head(content_length=len(content))
        for index, part in enumerate(parts):
            yield part
            if index < num_tokens - 1:
                await asyncio.sleep(self.gap_s)
        self.in_flight -= 1


@pytest.mark.clock
def test_the_measured_times_match_the_times_of_the_server(bench, null):
    server = Recorder(null, first_s=0.08, gap_s=0.03)
    options = ("--request-rate", "50", "--num-prompts", "20", "--slo", "ttft:1000,tpot:1")
    code, result, text = bench(server, *options)
    assert code == 0
    (point,) = result["points"]
    times = point["latencies_ms"]
    assert 80 <= times["ttft"]["p50"] < 120
    assert 30 <= times["itl"]["p50"] < 50 and times["itl"]["count"] == 60
    assert 30 <= times["tpot"]["p50"] < 50 and 170 <= times["e2e"]["p50"] < 300
    assert point["num_ok"] == 20 and point["goodput_per_s"] == 0
    assert point["requests"]["num_output_tokens"] == [4] * 20
    assert "goodput/s" in text and "≤ 1000" in text


def test_a_closed_loop_keeps_the_requested_number_of_requests_in_flight(bench, null):
    server = Recorder(null, first_s=0.005)
    code, result, _ = bench(server, "--concurrency", "1,3", "--num-prompts", "12")
    assert code == 0 and server.peak == 3
    assert [point["peak_in_flight"] for point in result["points"]] == [1, 3]
    prompts = [fields["prompt"] for _, fields in server.bodies]
    assert len(set(prompts)) == len(prompts) == 2 + 24, "no prompt is found in the prefix cache"


def test_a_burst_is_limited_by_concurrency(bench, null):
    server = Recorder(null, first_s=0.005)
    options = ("--request-rate", "inf", "--concurrency", "5", "--num-prompts", "20")
    code, result, _ = bench(server, *options)
    assert code == 0 and server.peak == 5 and result["points"][0]["is_burst"]


def test_a_turn_of_a_conversation_continues_the_text_of_the_previous_turn(bench, null):
    server = Recorder(null)
    options = ("--workload", "agents", "--num-prompts", "12", "--endpoint", "chat")
    code, result, _ = bench(server, *options, "--concurrency", "4", "--max-model-len", "100000")
    assert code == 0 and result["points"][0]["num_ok"] == 12
    bodies = [
        fields["messages"] for path, fields in server.bodies if path.endswith("/chat/completions")
    ]
    continued = [turns for turns in bodies if len(turns) > 1]
    assert continued
    for turns in continued:
        assert [turn["role"] for turn in turns[:3]] == ["user", "assistant", "user"]
        assert turns[1]["content"].startswith(" t0 t1") and turns[:1] in bodies


def test_each_request_has_the_requested_fields(bench, null):
    server = Recorder(null)
    options = ("--num-prompts", "2", "--extra-body", '{"top_k": 3}', "--no-ignore-eos")
    assert bench(server, *options, "--temperature", "0.5")[0] == 0
    _, fields = server.bodies[-1]
    assert fields["stream"] and fields["stream_options"] == {"include_usage": True}
    assert (fields["model"], fields["top_k"], fields["temperature"]) == ("null", 3, 0.5)
    assert fields["max_tokens"] == 4 and "ignore_eos" not in fields


async def _drip(head, part, count, gap_s=0.001):
    yield head
    for _ in range(count):
        yield part
        await asyncio.sleep(gap_s)


def _faults(null):
    data = b"data: "
    return {
        "malformed": null.whole(b"data: {broken\n\n"),
        "error event": null.whole(b'data: {"error": {"message": "out of memory"}}\n\n'),
        "wrong type": null.whole(b"<html>", "text/html"),
        "disconnected": null.whole(null.events(2, done=False)),
        "status 503": null.whole(b'{"error": {"message": "busy"}}', "application/json", "503 X"),
    }, {
        "disconnected": lambda: _drip(null.head(content_length=99), None, 1),
        "endless": lambda: _drip(null.head(), null.events(50, done=False), 1000),
        "malformed": lambda: _drip(null.head(), b"x" * (1 << 18), 1000),
        "timeout": lambda: _drip(null.head(), b": waiting\n", 100, 0.1),
        "wrong events": lambda: _drip(null.head(), data + b'{"choices": 5}\n\n', 1000),
        "headers": lambda: _drip(b"HTTP/1.1 200 OK\r\n", b"a: " + b"b" * 60000 + b"\r\n", 1000),
    }


@pytest.mark.costly
@pytest.mark.parametrize(
    ("group", "name", "kind"),
    [
        *((0, name, name) for name in ("malformed", "error event", "wrong type", "disconnected")),
        (0, "status 503", "status 503"),
        *((1, name, name) for name in ("disconnected", "endless", "malformed", "timeout")),
        (1, "wrong events", "malformed"),
        (1, "headers", "malformed"),
    ],
)
def test_an_invalid_response_does_not_affect_other_requests(bench, null, group, name, kind):
    fault, count = _faults(null)[group][name], 0

    def respond(path, body):
        nonlocal count
        count += 1
        invalid = fault if isinstance(fault, bytes) else fault()
        return invalid if count == 5 else null.whole(null.events(4))

    options = ("--num-prompts", "6", "--concurrency", "2", "--timeout-s", "1")
    code, result, text = bench(respond, *options)
    (point,) = result["points"]
    assert code == 0 and (point["num_ok"], point["num_failed"]) == (5, 1), text
    assert [error["kind"] for error in point["errors"]] == [kind]
    assert f"1 × {kind}: " in text


def test_no_request_is_sent_after_the_time_limit_of_a_measurement(bench, null):
    options = ("--request-rate", "20", "--arrivals", "constant", "--num-prompts", "100")
    code, result, text = bench(Recorder(null), *options, "--duration-s", "0.3")
    (point,) = result["points"]
    assert code == 0 and 1 <= point["num_ok"] <= 7, text
    assert point["num_ok"] + point["num_failed"] == 100
    assert [error["kind"] for error in point["errors"]] == ["not sent in time"]


@pytest.mark.parametrize("url", ["http://例え.invalid", "http://" + "a" * 60 + ".invalid"])
def test_the_error_for_a_host_that_cannot_be_found_names_it(run, url):
    code, _, messages = run("bench", "serve", "--url", url, "--model", "x")
    assert code == 2 and url in messages


@pytest.mark.costly
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--request-rate", "0"), "--request-rate 0"),
        (("--request-rate", "1:2:9999"), "--request-rate 1:2:9999"),
        (("--request-rate", "1,2", "--concurrency", "1,2"), "must be one number"),
        (("--concurrency", "1.5"), "must be one or more integers"),
        (("--num-prompts", "0"), "--num-prompts 0"),
        (("--slo", "ttft"), "--slo ttft"),
        (("--slo", "ttft:nan"), "--slo ttft:nan"),
        (("--extra-body", "[1]"), "--extra-body"),
        (("--workload", "nonsense"), "conversations"),
        (("--arrivals", "gamma"), "--arrivals needs --request-rate"),
        (("--html", "absent/x.html"), "--html absent/x.html"),
        (("--timeout-s", "inf"), "--timeout-s inf"),
    ],
)
def test_the_error_for_an_invalid_option_names_it(run, null, options, message):
    with null.running(lambda path, body: null.whole(null.events(4))) as url:
        code, _, messages = run("bench", "serve", "--url", url, *options)
    assert code == 2 and message in messages


def test_the_command_exits_if_the_server_is_unreachable_or_rejects_requests(run, null):
    code, _, messages = run("bench", "serve", "--url", "127.0.0.1:9")
    assert code == 2 and "cannot be reached" in messages
    reply = null.whole(b'{"error": {"message": "no such model"}}', "application/json", "404 X")
    with null.running(lambda path, body: reply) as url:
        code, _, messages = run("bench", "serve", "--url", url, "--model", "x")
    assert code == 2 and "no such model" in messages


@pytest.mark.costly
def test_the_html_report_has_all_charts_and_no_external_request(bench, null, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.html"
    server = Recorder(null, first_s=0.002)
    options = ("--request-rate", "200,400", "--num-prompts", "20", "--slo", "ttft:50")
    code, _, _ = bench(server, *options, "--html", path)
    page = path.read_text()
    assert code == 0 and page.count("<svg") == 4
    assert "Load sweep" in page and "goodput" in page
    urls = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", page)
    assert all(url.startswith("#") for url in urls), urls
    assert "<script" not in page and "@import" not in page


def test_summaries_follow_their_definitions():
    record = LoadRecord(duration_ns=2 * NS)
    for index in range(4):
        start = index * NS // 10
        record.requests.append(
            RequestTimes(
                number=index,
                planned_ns=start,
                sent_ns=start + 1_000_000,
                first_ns=start + 101_000_000 + index * 10_000_000,
                last_ns=start + 401_000_000,
                end_ns=start + 411_000_000,
                num_prompt_tokens=10,
                num_output_tokens=4,
            )
        )
    record.requests[3].error = record.add_error("timeout", "late")
    point = summarize(record, rate=2, concurrency=0, objectives={"ttft": 105})
    ttft, tpot = point.latencies["ttft"], point.latencies["tpot"]
    assert ttft.mean == pytest.approx(110) and ttft.percentiles[50] == pytest.approx(110)
    assert tpot.max == pytest.approx(100) and tpot.min == pytest.approx(280 / 3)
    assert point.latencies["e2e"].max == pytest.approx(410) and "itl" not in point.latencies
    assert (point.num_ok, point.num_failed, point.output_rate) == (3, 1, 6)
    assert point.goodput == 0.5 and point.goodput_share == 0.25
    assert point.send_delay_p99_ms == pytest.approx(1)


def test_percentiles_equal_those_of_numpy():
    numpy = pytest.importorskip("numpy")
    values = sorted(random.Random(1).random() for _ in range(101))
    for percent in (0, 50, 90, 99, 99.5, 100):
        assert percentile(values, percent) == pytest.approx(numpy.percentile(values, percent))


@pytest.mark.parametrize("process", ["poisson", "gamma", "constant"])
def test_arrivals_have_the_requested_rate_and_burstiness(process):
    times = sample_arrivals(process, 20_000, 50, burstiness=0.25, seed=1)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean
    assert NS / mean == pytest.approx(50, rel=0.05)
    assert deviation == pytest.approx({"poisson": 1, "gamma": 2, "constant": 0}[process], abs=0.1)
    duplicates = sample_arrivals(process, 20_000, 100, burstiness=0.25, seed=1)
    assert duplicates[-1] == pytest.approx(times[-1] / 2, rel=1e-6)


def test_prompts_have_the_intended_number_of_tokens():
    scale = measured_scale({32: 58, 160: 250})  # 1.5 tokens per word and a template of 10 tokens
    assert scale.overhead == 10 and scale.words_per_token == pytest.approx(2 / 3)
    assert len(PromptWriter(scale, "1").words("a", 300).split()) == 200
    assert measured_scale({32: 0, 160: 0}) == TokenScale()
