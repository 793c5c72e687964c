"""Executes batch lines with an engine of this process, without a server."""

from __future__ import annotations

from dovetail.clock import MonotonicClock
from dovetail.engine.async_llm import AsyncLLM
from dovetail_server.lifecycle.admission import Admission
from dovetail_server.lifecycle.engine_slot import EngineSlot
from dovetail_server.routes.completions import completion_routes
from dovetail_server.routes.pooling import pooling_routes
from dovetail_server.routes.table import RouteTable
from dovetail_server.settings import ServerSettings
from dovetail_server.state import ServerState
from dovetail_server.transport.internal import InternalCalls


def local_calls(
    llm: AsyncLLM, *, served_model_name: str, settings: ServerSettings | None = None
) -> InternalCalls:
    """Return an object that calls the routes with an engine, for use in its event loop.

    settings: the limits of the requests; the defaults of a server if None.
    """
    slot = EngineSlot(served_model_name)
    slot.put(llm)
    state = ServerState(
        settings=settings or ServerSettings(), slot=slot, admission=Admission(MonotonicClock())
    )
    return InternalCalls(RouteTable([*completion_routes(state), *pooling_routes(state)]), state)
