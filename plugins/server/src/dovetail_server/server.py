"""Runs a server: listening sockets, the event loop, the engine, and the end of both."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import uvicorn
import uvloop

from dovetail.clock import MonotonicClock
from dovetail.engine.async_llm import AsyncLLM
from dovetail.errors import ConfigError
from dovetail_server.lifecycle.admission import Admission
from dovetail_server.lifecycle.engine_slot import EngineSlot
from dovetail_server.lifecycle.shutdown import Drain
from dovetail_server.routes.completions import completion_routes
from dovetail_server.routes.plugin_routes import PluginRoutes
from dovetail_server.routes.status import status_routes
from dovetail_server.routes.table import RouteTable
from dovetail_server.settings import ServerSettings
from dovetail_server.state import ServerState
from dovetail_server.transport.application import Application
from dovetail_server.transport.connection import limited_protocol
from dovetail_server.transport.exchange import Exchange

logger = logging.getLogger(__name__)

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise ConfigError if the address cannot be used."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--host {host} cannot be used: {error.strerror}.") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Port {port} of {host} cannot be used: {error.strerror}.\n"
            "Choose another one with --port, or --port 0 for a free one."
        ) from None
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the address of a listening socket as "host:port"."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def make_state(settings: ServerSettings, served_model_name: str) -> ServerState:
    """Return the state of a server whose engine is not loaded yet."""
    slot = EngineSlot(served_model_name)
    state = ServerState(settings=settings, slot=slot, admission=Admission(MonotonicClock()))
    return state


def make_table(state: ServerState) -> RouteTable:
    """Return the routes of the public listener, without those of plugins."""
    return RouteTable([*status_routes(state), *completion_routes(state)])


def run_server(state: ServerState, listener: socket.socket, make: Callable[[], AsyncLLM]) -> int:
    """Serve until a signal; return the exit code. make: creates the engine, in a thread."""
    return uvloop.run(_serve(state, listener, make))


async def _serve(state: ServerState, listener: socket.socket, make: Callable[[], AsyncLLM]) -> int:
    drain = Drain(state.slot, state.settings.drain_timeout_s)
    drain.install()
    table = make_table(state)
    application = Application(table, _no_guard, state.settings)
    server = _QuietServer(_uvicorn_config(application, state.settings))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    plugins = ExitStack()
    loading = asyncio.create_task(_load(state, table, make, plugins))
    loading.add_done_callback(lambda task: _announce(task, state, listener, drain))
    try:
        await drain.requested.wait()
        await loading  # raises the error of an engine that could not start
        complete = await drain.finish([application])
        server.should_exit = True
        await serving
    finally:
        plugins.close()
        await asyncio.to_thread(state.slot.shutdown)
    logger.info("The server has shut down.")
    return 0 if complete else 1


async def _load(
    state: ServerState, table: RouteTable, make: Callable[[], AsyncLLM], plugins: ExitStack
) -> None:
    """Load the engine and the routes of plugins."""
    slot = state.slot
    llm = await slot.load(make)
    routes = PluginRoutes(llm, slot.served_model_name)
    plugins.callback(routes.close)
    for route in routes.routes():
        table.add(route)
    slot.put(llm)


def _announce(
    loading: asyncio.Task[None], state: ServerState, listener: socket.socket, drain: Drain
) -> None:
    """Log that the server is ready; if it could not start, end it."""
    if loading.cancelled() or loading.exception() is not None:
        drain.handle_signal()
        return
    name, address = state.slot.served_model_name, address_of(listener)
    logger.info("Ready: %s on http://%s/v1", name, address)


class _QuietServer(uvicorn.Server):
    """uvicorn's server; the drain handles the signals."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Leave the signals to the drain."""
        return nullcontext()


def _uvicorn_config(application: Application, settings: ServerSettings) -> uvicorn.Config:
    return uvicorn.Config(
        application,  # type: ignore[arg-type]  # uvicorn's types are stricter than ASGI
        http=limited_protocol(settings),
        loop="none",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=max(1, round(settings.keep_alive_s)),
        timeout_graceful_shutdown=3,
        backlog=BACKLOG,
    )


def _no_guard(exchange: Exchange, public: bool) -> None:
    return None
