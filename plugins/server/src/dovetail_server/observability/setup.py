"""The observers that the settings of a server enable, and the route /metrics."""

from __future__ import annotations

import importlib.util
import os
from contextlib import ExitStack

from dovetail.errors import ConfigError
from dovetail_server.observability.function_trace import FunctionTrace
from dovetail_server.observability.metrics import MEDIA_TYPE, RequestMetrics
from dovetail_server.observability.request_log import RequestLog
from dovetail_server.routes.table import Route
from dovetail_server.state import ServerState
from dovetail_server.transport.exchange import Exchange


def observe(state: ServerState, resources: ExitStack) -> list[Route]:
    """Add the observers to `state`. Return their routes. resources: closes them at the end."""
    settings = state.settings
    metrics = RequestMetrics(state.slot, vllm_names=settings.vllm_metric_names)
    state.observers.add(metrics)
    if settings.log_requests:
        state.observers.add(RequestLog())
    if settings.otlp_traces_endpoint is not None:
        _add_traces(state, resources, settings.otlp_traces_endpoint)

    if settings.trace_functions is not None:
        path = settings.trace_functions
        if settings.api_processes > 1:
            path = f"{path}.{os.getpid()}"
        resources.callback(FunctionTrace(path, state.clock).stop)

    async def respond(exchange: Exchange) -> None:
        await exchange.respond_raw(200, ((b"content-type", MEDIA_TYPE),), metrics.exposition())

    return [Route(method="GET", path="/metrics", handler=respond, media_type="text/plain")]


def _add_traces(state: ServerState, resources: ExitStack, endpoint: str) -> None:
    if importlib.util.find_spec("opentelemetry") is None:
        raise ConfigError(
            "--otlp-traces-endpoint needs OpenTelemetry.\nRun: pip install 'dovetail-server[otel]'"
        )
    from dovetail_server.observability.traces import RequestTraces, make_exporter

    traces = RequestTraces(
        make_exporter(endpoint),
        served_model_name=state.slot.served_model_name,
        clock=state.clock,
    )
    state.observers.add(traces)
    resources.callback(traces.close)
