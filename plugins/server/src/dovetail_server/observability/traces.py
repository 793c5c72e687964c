"""OpenTelemetry spans (`--otlp-traces-endpoint`): request, queue, prefill and decode.

Spans are created when the request ends, with the times of the engine. The `traceparent` header of
a request selects the parent span.
"""

from __future__ import annotations

import time
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Span, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from dovetail.clock import Clock
from dovetail.errors import ConfigError
from dovetail.outputs import PoolingRequestOutput, RequestOutput
from dovetail_server.observers import RequestRecord

SERVICE = "dovetail"


def make_exporter(endpoint: str) -> SpanExporter:
    """Return the exporter for an OTLP endpoint. Raise ConfigError if its package is missing."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError:
        raise ConfigError(
            "--otlp-traces-endpoint needs the OTLP exporter.\n"
            "Run: pip install 'dovetail-server[otel]'"
        ) from None
    exporter: SpanExporter = OTLPSpanExporter(endpoint=endpoint)
    return exporter


class RequestTraces:
    """Observes requests, and exports their spans. clock: the clock of the engine."""

    def __init__(
        self, exporter: SpanExporter, *, served_model_name: str, clock: Clock, batch: bool = True
    ) -> None:
        self._model = served_model_name
        self._clock = clock
        self._provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}))
        if batch:
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        else:
            from opentelemetry.sdk.trace.export import SimpleSpanProcessor

            self._provider.add_span_processor(SimpleSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(SERVICE)

    def close(self) -> None:
        """Export the remaining spans."""
        self._provider.shutdown()

    def request_started(self, request_id: str, route: str) -> None:
        """Do nothing, because the spans are created at the end."""

    def request_rejected(self, route: str, status: int, code: str) -> None:
        """Do nothing, because a rejected request has no spans."""

    def request_ended(self, record: RequestRecord) -> None:
        """Create the spans of a request."""
        # Spans have the time of day, and the engine's clock is monotonic.
        offset_ns = time.time_ns() - self._clock.now_ns()
        parent = TraceContextTextMapPropagator().extract({"traceparent": record.traceparent})
        span: Any = self._tracer.start_span(
            "request",
            context=parent,
            kind=trace.SpanKind.SERVER,
            start_time=record.arrival_ns + offset_ns,
            attributes=self._attributes(record),
        )
        if record.status == "error":
            span.set_status(trace.StatusCode.ERROR, record.code)
        inside = trace.set_span_in_context(span)
        for output in record.outputs:
            self._phases(output, inside, offset_ns)
        span.end(end_time=record.end_ns + offset_ns)

    def _attributes(self, record: RequestRecord) -> dict[str, Any]:
        return {
            "http.route": record.route,
            "gen_ai.system": SERVICE,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": record.request_id,
            "gen_ai.usage.input_tokens": sum(
                len(output.prompt_token_ids) for output in record.outputs
            ),
            "gen_ai.usage.output_tokens": record.num_completion_tokens,
            "dovetail.status": record.status,
            "dovetail.streamed": record.streamed,
        }

    def _phases(
        self, output: RequestOutput | PoolingRequestOutput, inside: Any, offset_ns: int
    ) -> None:
        times = output.metrics
        first, end = times.first_token_ns, times.finished_ns
        if first is None or end is None:
            return
        admitted = times.admitted_ns or times.arrival_ns
        phases = (
            ("queue", times.arrival_ns, admitted),
            ("prefill", admitted, first),
            ("decode", first, end),
        )
        for name, start_ns, end_ns in phases:
            span: Span | Any = self._tracer.start_span(
                name, context=inside, start_time=start_ns + offset_ns
            )
            span.end(end_time=end_ns + offset_ns)
