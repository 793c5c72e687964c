"""Prometheus metrics: counts and times of requests, and the state of the engine at each scrape.

Names of Dovetail's metrics begin with `dovetail_`. With `vllm_names`, each metric also has the name
that dashboards for vLLM use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from dovetail.outputs import PoolingRequestOutput, RequestOutput
from dovetail_server.lifecycle.engine_slot import EngineSlot
from dovetail_server.observers import RequestRecord
from dovetail_server.protocol.errors import APIError

SHARED_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable of prometheus_client: the directory in which processes share counts."""
MEDIA_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Bucket bounds of the time histograms, in seconds."""
TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
"""Bucket bounds of the token-count histograms."""

GAUGES = {
    "dovetail_requests_running": ("num_running", "Running requests."),
    "dovetail_requests_waiting": ("num_waiting", "Waiting requests."),
    "dovetail_kv_cache_usage_ratio": ("kv_cache_usage", "Share of the KV cache in use, 0 to 1."),
}
"""Maps each name to the field of the scheduler's statistics and to the description."""
TOTALS = {
    "dovetail_prefix_cache_queries": ("prefix_queries", "Tokens looked up in the prefix cache."),
    "dovetail_prefix_cache_hits": ("prefix_hits", "Tokens found in the prefix cache."),
    "dovetail_preemptions": ("num_preemptions", "Preempted requests."),
    "dovetail_cache_evictions": ("num_evictions", "Cached blocks that were reused."),
    "dovetail_draft_tokens": ("num_drafts", "Verified draft tokens."),
    "dovetail_accepted_draft_tokens": ("num_accepted", "Accepted draft tokens."),
}
"""The same for counters; the text format adds `_total` to the name."""

VLLM_NAMES = {
    "dovetail_requests_running": ("vllm:num_requests_running",),
    "dovetail_requests_waiting": ("vllm:num_requests_waiting",),
    "dovetail_kv_cache_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "dovetail_prefix_cache_queries": ("vllm:prefix_cache_queries",),
    "dovetail_prefix_cache_hits": ("vllm:prefix_cache_hits",),
    "dovetail_preemptions": ("vllm:num_preemptions",),
    "dovetail_draft_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "dovetail_accepted_draft_tokens": ("vllm:spec_decode_num_accepted_tokens",),
    "dovetail_prompt_tokens": ("vllm:prompt_tokens",),
    "dovetail_generation_tokens": ("vllm:generation_tokens",),
    "dovetail_completions_finished": ("vllm:request_success",),
    "dovetail_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "dovetail_time_per_output_token_seconds": (
        "vllm:request_time_per_output_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
    ),
    "dovetail_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "dovetail_queue_time_seconds": ("vllm:request_queue_time_seconds",),
    "dovetail_prefill_time_seconds": ("vllm:request_prefill_time_seconds",),
    "dovetail_decode_time_seconds": ("vllm:request_decode_time_seconds",),
    "dovetail_inference_time_seconds": ("vllm:request_inference_time_seconds",),
    "dovetail_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "dovetail_request_generation_tokens": ("vllm:request_generation_tokens",),
}
"""Maps each metric of Dovetail to its names in vLLM."""
VLLM_LABELS = {"model": "model_name", "reason": "finished_reason"}


class RequestMetrics:
    """Observes requests. `exposition` returns all metrics. slot: contains the engine."""

    def __init__(self, slot: EngineSlot, *, vllm_names: bool = False) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self._model = slot.served_model_name
        self._aliases = vllm_names
        self._engine = EngineCollector(slot)
        self.registry.register(self._engine)
        ProcessCollector(registry=self.registry)
        self._ended = self._counter("requests", "Ended requests.", "route", "status", "code")
        self._errors = self._counter("http_errors", "Responses with an error.", "status", "code")
        self._finished = self._counter("completions_finished", "Ended completions.", "reason")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens.")
        self._cached_tokens = self._counter(
            "cached_prompt_tokens", "Prompt tokens that were found in the prefix cache."
        )
        self._new_tokens = self._counter("generation_tokens", "Generated tokens.")
        self._ttft = self._times("time_to_first_token", "Time from arrival to the first token.")
        self._tpot = self._times(
            "time_per_output_token", "Mean time between two tokens of a request."
        )
        end = "to the end of the request."
        self._latency = self._times("request_latency", f"Time from arrival {end}")
        self._queue = self._times("queue_time", "Time from arrival to the first step.")
        self._prefill = self._times("prefill_time", "Time from the first step to the first token.")
        self._decode = self._times("decode_time", f"Time from the first token {end}")
        self._inference = self._times("inference_time", f"Time from the first step {end}")
        self._prompt_sizes = self._sizes("request_prompt_tokens", "Number of tokens of a prompt.")
        self._new_sizes = self._sizes(
            "request_generation_tokens", "Number of tokens generated for a prompt."
        )

    def exposition(self) -> bytes:
        """Return the metrics of all API processes, in Prometheus's text format."""
        registry = self.registry
        if SHARED_VARIABLE in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
            registry.register(self._engine)
        content: bytes = generate_latest(registry)
        return content + generate_latest(_Aliases(registry)) if self._aliases else content

    # --- RequestObserver ------------------------------------------------------------------------

    def request_started(self, request_id: str, route: str) -> None:
        """Do nothing, because the engine counts running requests."""

    def request_ended(self, record: RequestRecord) -> None:
        """Count a request."""
        self._ended.labels(self._model, record.route, record.status, record.code).inc()
        self._new_tokens.labels(self._model).inc(record.num_completion_tokens)
        for reason in record.finish_reasons:
            self._finished.labels(self._model, reason).inc()
        counts = record.num_tokens or (0,) * len(record.outputs)
        for output, num_tokens in zip(record.outputs, counts, strict=True):
            self._add_output(output, num_tokens)

    def request_rejected(self, route: str, status: int, code: str) -> None:
        """Count a response with an error."""
        self._errors.labels(self._model, str(status), code).inc()

    def _add_output(self, output: RequestOutput | PoolingRequestOutput, num_tokens: int) -> None:
        """Count one prompt. num_tokens: generated tokens of all its completions."""
        model, times = self._model, output.metrics
        num_prompt = len(output.prompt_token_ids)
        self._prompt_tokens.labels(model).inc(num_prompt)
        self._cached_tokens.labels(model).inc(output.num_cached_tokens)
        self._prompt_sizes.labels(model).observe(num_prompt)
        self._new_sizes.labels(model).observe(num_tokens)
        first, end, admitted = times.first_token_ns, times.finished_ns, times.admitted_ns
        if first is None or end is None:
            return
        self._ttft.labels(model).observe((first - times.arrival_ns) / 1e9)
        self._latency.labels(model).observe((end - times.arrival_ns) / 1e9)
        self._decode.labels(model).observe((end - first) / 1e9)
        if num_tokens > 1:
            self._tpot.labels(model).observe((end - first) / 1e9 / (num_tokens - 1))
        if admitted:
            self._queue.labels(model).observe((admitted - times.arrival_ns) / 1e9)
            self._prefill.labels(model).observe((first - admitted) / 1e9)
            self._inference.labels(model).observe((end - admitted) / 1e9)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"dovetail_{name}", text, ("model", *labels), registry=self.registry)

    def _times(self, name: str, text: str) -> Histogram:
        name = f"dovetail_{name}_seconds"
        return Histogram(name, text, ("model",), registry=self.registry, buckets=SECONDS)

    def _sizes(self, name: str, text: str) -> Histogram:
        name = f"dovetail_{name}"
        return Histogram(name, text, ("model",), registry=self.registry, buckets=TOKENS)


@contextmanager
def shared_metrics() -> Iterator[None]:
    """Let child processes started in the context share their counts in a temporary directory."""
    with TemporaryDirectory(prefix="dovetail-metrics-") as folder:
        os.environ[SHARED_VARIABLE] = folder
        try:
            yield
        finally:
            del os.environ[SHARED_VARIABLE]


class EngineCollector(Collector):
    """Reads the latest statistics of the engine at each scrape."""

    def __init__(self, slot: EngineSlot) -> None:
        self._slot = slot

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges and counters of the engine."""
        try:
            stats: Any = self._slot.llm.last_stats
        except APIError:  # the engine is loading
            stats = None
        for name, (field, text) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=("model",))
            gauge.add_metric([self._slot.served_model_name], float(getattr(stats, field, 0)))
            yield gauge
        for name, (field, text) in TOTALS.items():
            counter = CounterMetricFamily(name, text, labels=("model",))
            counter.add_metric([self._slot.served_model_name], float(getattr(stats, field, 0)))
            yield counter


class _Aliases(CollectorRegistry):
    """The metrics of another registry under the names of vLLM."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._source = registry

    def collect(self) -> Iterator[Metric]:
        """Yield the renamed metrics."""
        for family in self._source.collect():
            for name in VLLM_NAMES.get(family.name, ()):
                renamed = Metric(name, family.documentation, family.type)
                for sample in family.samples:
                    labels = {VLLM_LABELS.get(key, key): v for key, v in sample.labels.items()}
                    suffix = sample.name.removeprefix(family.name)
                    renamed.add_sample(f"{name}{suffix}", labels, sample.value)
                yield renamed
