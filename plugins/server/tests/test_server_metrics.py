"""Metrics, request log and traces of a server."""

import gzip
import json
import re
import time
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from dovetail.clock import MonotonicClock
from dovetail.outputs import RequestMetrics as Times
from dovetail.outputs import RequestOutput
from dovetail_server.lifecycle.engine_slot import EngineSlot
from dovetail_server.observability import metrics as metrics_module
from dovetail_server.observability.metrics import VLLM_NAMES, RequestMetrics
from dovetail_server.observability.traces import RequestTraces
from dovetail_server.observers import RequestRecord

pytestmark = pytest.mark.costly  # the tests share servers

DASHBOARD = Path(metrics_module.__file__).with_name("grafana_dashboard.json")
ADMIN = "admin-key-of-the-tests"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


def samples_of(text):
    """Return the values by (name, labels without the model)."""
    by_name = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model", "model_name")}
            by_name[sample.name, tuple(sorted(labels.items()))] = sample.value
    return by_name


def scrape(server):
    reply = server.get("/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    return samples_of(reply.content.decode())


def record_of(**changed):
    output = RequestOutput(
        "inner", None, [1, 2, 3], [], True, Times(1_000, 5_000, 9_000, 2_000), None, 1
    )
    fields = {
        "request_id": "req-1",
        "route": "/v1/completions",
        "status": "ok",
        "code": "",
        "outputs": (output,),
        "streamed": True,
        "num_completion_tokens": 5,
        "num_tokens": (5,),
        "finish_reasons": ("stop",),
        "arrival_ns": 900,
        "end_ns": 9_500,
    }
    return RequestRecord(**(fields | changed))


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    """Return the directory for profiles of `observed`."""
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def observed(serving, profiles):
    """Return a server with metrics, request logs and profiles, but without traces."""
    options = ("--model", "demo", "--max-model-len", "512", "--vllm-metric-names", "--log-requests")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOVETAIL_PROFILE_DIR", str(profiles))
        with serving(*options, "--admin-key", ADMIN) as running:
            yield running.wait_until_ready()


def num_requests(after, before):
    names = ("dovetail_requests_total", "dovetail_http_errors_total")
    return sum(value - before.get(key, 0) for key, value in after.items() if key[0] in names)


def test_the_metrics_count_the_responses_of_the_server(observed):
    before = scrape(observed)
    plain = observed.complete(prompt="reverse: robot", max_tokens=5, ignore_eos=True).json
    streamed = observed.chat(stream=True, max_tokens=4, ignore_eos=True, n=2)
    assert streamed.events[-1] == "[DONE]"
    assert observed.complete(prompt="x", temperature="warm").status == 400
    after = scrape(observed)
    for _ in range(100):  # a request is counted after its response was sent
        if after["dovetail_requests_running", ()] == 0 and num_requests(after, before) == 3:
            break
        time.sleep(0.1)
        after = scrape(observed)

    def increase(name, **labels):
        key = (name, tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0)

    assert increase("dovetail_generation_tokens_total") == 5 + 8
    assert increase("dovetail_prompt_tokens_total") > plain["usage"]["prompt_tokens"]
    assert increase("dovetail_completions_finished_total", reason="length") == 3
    ok = {"status": "ok", "code": ""}
    assert increase("dovetail_requests_total", route="/v1/completions", **ok) == 1
    assert increase("dovetail_requests_total", route="/v1/chat/completions", **ok) == 1
    errors = {
        dict(labels)["status"]: value - before.get((name, labels), 0)
        for (name, labels), value in after.items()
        if name == "dovetail_http_errors_total" and value > before.get((name, labels), 0)
    }
    assert errors == {"400": 1}
    for name in ("time_to_first_token", "queue_time", "prefill_time", "decode_time"):
        assert increase(f"dovetail_{name}_seconds_count") == 2, name
    parts = [increase(f"dovetail_{name}_seconds_sum") for name in ("queue_time", "prefill_time")]
    assert sum(parts) == pytest.approx(increase("dovetail_time_to_first_token_seconds_sum"))
    assert increase("dovetail_request_generation_tokens_sum") == 13
    assert after["dovetail_requests_running", ()] == 0
    assert 0 <= after["dovetail_kv_cache_usage_ratio", ()] <= 1


def aliases_of(values, own, name):
    """Yield (key of a Dovetail metric, key of the same metric under its vLLM name)."""
    exact = {own, *(f"{own}{end}" for end in ("_total", "_sum", "_count"))}
    for key in [key for key in values if key[0] in exact]:
        labels = [("finished_reason", v) if k == "reason" else (k, v) for k, v in key[1]]
        yield key, (name + key[0].removeprefix(own), tuple(sorted(labels)))


@pytest.mark.parametrize("own", VLLM_NAMES)
def test_a_vllm_metric_name_has_the_value_of_the_dovetail_metric(observed, own):
    observed.complete(prompt="reverse: robot")
    values = scrape(observed)
    pairs = [pair for name in VLLM_NAMES[own] for pair in aliases_of(values, own, name)]
    assert pairs
    for key, alias in pairs:
        assert values[alias] == values[key], alias


def test_vllm_metric_names_are_exposed_only_with_the_option(server):
    assert not [name for name, _ in scrape(server) if name.startswith("vllm:")]


def test_an_operator_records_a_profile(observed, profiles):
    key = {"Authorization": f"Bearer {ADMIN}"}
    assert observed.post("/stop_profile", {}, **key).status == 400
    assert observed.post("/start_profile", {}, **key).json == {"profiling": True}
    assert observed.post("/start_profile", {}, **key).status == 400
    observed.complete(prompt="reverse: robot")
    assert observed.post("/stop_profile", {}, **key).json == {"profiling": False}
    (file,) = profiles.iterdir()
    assert json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def test_requests_are_logged_without_prompts(observed):
    observed.complete(prompt="a canary prompt", max_tokens=3, ignore_eos=True)
    line = observed.wait_for(r"(req-\w+) /v1/completions: ok, \d+ prompt tokens, 3 new").string
    assert "canary" not in "\n".join(filter(None, observed.lines))
    assert "canary" not in line


def test_requests_are_not_logged_by_default(server):
    server.complete(prompt="a canary prompt")
    time.sleep(0.5)  # a thread reads the lines
    assert not [line for line in server.lines if "prompt tokens" in line or "canary" in line]


def test_the_dashboard_shows_existing_metrics_only():
    metrics = RequestMetrics(EngineSlot("m"))
    metrics.request_ended(record_of())
    metrics.request_rejected("/x", 400, "bad")
    known = {name for name, _ in samples_of(metrics.exposition().decode())}
    content = DASHBOARD.read_text("utf-8")
    dashboard = json.loads(content)
    used = set(re.findall(r"dovetail_[a-z_]+", content))
    assert len(dashboard["panels"]) >= 8 and used
    assert used <= known
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_a_request_without_outputs_is_counted():
    metrics = RequestMetrics(EngineSlot("m"))
    metrics.request_ended(record_of(status="left", outputs=(), num_tokens=(), finish_reasons=()))
    values = samples_of(metrics.exposition().decode())
    labels = (("code", ""), ("route", "/v1/completions"), ("status", "left"))
    assert values["dovetail_requests_total", labels] == 1


@pytest.fixture
def spans():
    """Return a function that returns the spans of records, by name."""

    def spans(*records):
        exporter = InMemorySpanExporter()
        traces = RequestTraces(
            exporter, served_model_name="tiny", clock=MonotonicClock(), batch=False
        )
        for record in records:
            traces.request_ended(record)
        traces.close()
        return {span.name: span for span in exporter.get_finished_spans()}

    return spans


def test_a_request_has_spans_for_queue_prefill_and_decode(spans):
    actual = spans(record_of())
    assert set(actual) == {"request", "queue", "prefill", "decode"}
    request = actual["request"]
    start = request.start_time
    assert request.end_time - start == 9_500 - 900
    times = {n: (s.start_time - start + 900, s.end_time - start + 900) for n, s in actual.items()}
    assert times["queue"] == (1_000, 2_000)
    assert times["prefill"] == (2_000, 5_000)
    assert times["decode"] == (5_000, 9_000)
    for name in ("queue", "prefill", "decode"):
        assert actual[name].parent.span_id == request.context.span_id
    assert request.attributes["gen_ai.usage.input_tokens"] == 3
    assert request.attributes["gen_ai.usage.output_tokens"] == 5
    assert request.attributes["gen_ai.response.model"] == "tiny"


def test_the_traceparent_header_selects_the_parent_of_a_request(spans):
    actual = spans(record_of(traceparent=f"00-{TRACE_ID}-b7ad6b7169203331-01"))
    assert f"{actual['decode'].context.trace_id:032x}" == TRACE_ID
    assert f"{actual['request'].parent.span_id:016x}" == "b7ad6b7169203331"


@pytest.mark.parametrize("header", ["", "x" * 100, "00-0-0-00", f"00-{'0' * 32}-{'0' * 16}-01"])
def test_an_invalid_traceparent_header_starts_a_new_trace(spans, header):
    assert spans(record_of(traceparent=header))["request"].parent is None


def test_a_failed_request_has_an_error_status(spans):
    actual = spans(record_of(status="error", code="engine_failed", outputs=(), num_tokens=()))
    assert set(actual) == {"request"}
    assert actual["request"].status.description == "engine_failed"
