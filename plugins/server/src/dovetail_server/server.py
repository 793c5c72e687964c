"""Runs a server: its listeners, the event loop and the engine, and their shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Protocol

import uvicorn
import uvloop

from dovetail.clock import MonotonicClock
from dovetail.engine.async_llm import AsyncLLM
from dovetail_server.batches.runner import BatchRunner
from dovetail_server.lifecycle.admission import Admission
from dovetail_server.lifecycle.engine_slot import EngineSlot
from dovetail_server.lifecycle.loop_probe import LoopProbe
from dovetail_server.lifecycle.shutdown import Drain
from dovetail_server.lifecycle.start_report import start_report
from dovetail_server.listening import BACKLOG, address_of, tls_context
from dovetail_server.observability.metrics import shared_metrics
from dovetail_server.observability.setup import observe
from dovetail_server.routes.admin import admin_routes
from dovetail_server.routes.batches import batch_routes
from dovetail_server.routes.completions import completion_routes
from dovetail_server.routes.files import file_routes
from dovetail_server.routes.messages import messages_routes
from dovetail_server.routes.openapi import openapi_route
from dovetail_server.routes.plugin_routes import PluginRoutes
from dovetail_server.routes.pooling import pooling_routes
from dovetail_server.routes.responses import responses_routes
from dovetail_server.routes.status import status_routes
from dovetail_server.routes.table import RouteTable
from dovetail_server.routes.tokens import token_routes
from dovetail_server.settings import ServerSettings
from dovetail_server.state import NoOthers, OtherProcesses, ServerState
from dovetail_server.storage.batches import BatchStore
from dovetail_server.storage.database import Database, storage_folder
from dovetail_server.storage.files import FileStore
from dovetail_server.storage.responses import ResponseStore
from dovetail_server.transport.application import Application
from dovetail_server.transport.connection import limited_protocol
from dovetail_server.transport.guard import Guard
from dovetail_server.transport.internal import InternalCalls
from dovetail_server.transport.keys import admin_keys, client_keys
from dovetail_server.web_page.routes import page_routes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Listeners:
    """The listening sockets.

    admin: the socket of the admin routes, if they have a separate port.
    """

    public: socket.socket
    admin: socket.socket | None = None


def make_state(
    settings: ServerSettings, served_model_name: str, others: OtherProcesses | None = None
) -> ServerState:
    """Return the state of a server whose engine is not loaded yet."""
    return ServerState(
        others=others or NoOthers(),
        settings=settings,
        slot=EngineSlot(served_model_name),
        admission=Admission(MonotonicClock()),
    )


def run_server(state: ServerState, listeners: Listeners, make: Callable[[], AsyncLLM]) -> int:
    """Serve until a signal arrives. Return the exit code. make: creates the engine, in a thread.

    Raises ConfigError for keys or TLS files that cannot be used, and the error of an engine or
    plugin that could not start.
    """
    with storage_folder(state) as stored:
        if stored.settings.api_processes == 1:
            return Server(stored, listeners).serve(make)
        from dovetail_server.processes.supervisor import Supervisor

        with shared_metrics():
            return Supervisor(stored, listeners, lambda: log_ready(stored, listeners)).serve(make)


def log_ready(state: ServerState, listeners: Listeners) -> None:
    """Log that the server is ready, and its addresses."""
    scheme = "http" if state.settings.ssl_certfile is None else "https"
    name, address = state.slot.served_model_name, address_of(listeners.public)
    logger.info("Ready: %s on %s://%s/v1", name, scheme, address)
    if state.settings.verbose:
        for line in start_report(state.slot.llm):
            logger.info(line)
    if listeners.admin is not None:
        logger.info("Admin routes: %s://%s", scheme, address_of(listeners.admin))


class Lead(Protocol):
    """The main process of a server, as seen by an API process.

    replaces_another: whether this process replaces an API process that has exited.
    """

    replaces_another: bool

    def follow(self, drain: Drain) -> None:
        """Handle the messages of the main process from now on."""

    def announce(self) -> None:
        """Report that this process serves requests."""


class Server:
    """A server. table: the routes of the public listener."""

    def __init__(self, state: ServerState, listeners: Listeners) -> None:
        settings = state.settings
        # A client can cause uvicorn's warnings, such as one for each request that is not HTTP.
        logging.getLogger("uvicorn").setLevel(logging.ERROR)
        database = Database(settings.storage_dir)
        self._plugins = ExitStack()
        self._plugins.callback(database.close)
        self.table = RouteTable(
            [
                *status_routes(state),
                *completion_routes(state),
                *token_routes(state),
                *pooling_routes(state),
                *page_routes(state),
                *messages_routes(state),
                *responses_routes(state, ResponseStore(database, settings)),
            ]
        )
        self.table.add(openapi_route(self.table))
        self._state = state
        self._listeners = listeners
        probe = LoopProbe()
        self._batches = _add_batches(self.table, state, database, probe)
        for route in observe(state, self._plugins):
            self.table.add(route)
        keys, operators = client_keys(settings), admin_keys(settings)
        self._tls = tls_context(settings)
        guard = Guard(settings, keys, operators)

        def application(table: RouteTable, guard: Guard) -> Application:
            return Application(table, guard, settings, state.observers, probe, state.exchanges)

        self._applications = [application(self.table, guard)]
        admin = admin_routes(state)
        if listeners.admin is not None:
            table = RouteTable([*status_routes(state), *admin])
            own = Guard(settings, operators or keys, operators)
            self._applications.append(application(table, own))
        elif operators:
            for route in admin:
                self.table.add(route)

    def serve(self, make: Callable[[], AsyncLLM], lead: Lead | None = None) -> int:
        """Serve until a signal arrives or `lead` requests a shutdown. Return the exit code."""
        return uvloop.run(self.run(make, lead))

    async def run(self, make: Callable[[], AsyncLLM], lead: Lead | None = None) -> int:
        """Serve until a signal arrives or `lead` requests a shutdown. Return the exit code."""
        state = self._state
        drain = Drain(state.slot, state.settings.drain_timeout_s)
        if lead is None:
            drain.install()
        else:
            lead.follow(drain)
        sockets = [item for item in (self._listeners.public, self._listeners.admin) if item]
        servers = [
            _QuietServer(self._uvicorn_config(application)) for application in self._applications
        ]
        self._batches.start()
        loading = asyncio.create_task(self._load(make))
        loading.add_done_callback(lambda task: self._announce(task, drain, lead))
        if lead is not None and lead.replaces_another:
            await asyncio.wait([loading])  # until then, the other processes accept connections
        serving = [
            asyncio.create_task(server.serve(sockets=[listener]))
            for server, listener in zip(servers, sockets, strict=True)
        ]
        try:
            await drain.requested.wait()
            await self._batches.stop()
            await _finish_loading(loading, drain)
            complete = await drain.finish(state.exchanges)
        finally:
            for server in servers:
                server.should_exit = True
            # If warnings are errors, a listener that is still open prevents uvloop from exiting.
            await asyncio.gather(*serving, return_exceptions=True)
            self._plugins.close()
            await asyncio.to_thread(state.slot.shutdown)
        if lead is None:
            logger.info("The server has shut down.")
        return 0 if complete else 1

    async def _load(self, make: Callable[[], AsyncLLM]) -> None:
        """Load the engine and the routes of plugins."""
        slot = self._state.slot
        llm = await slot.load(make)
        routes = PluginRoutes(llm, slot)
        self._plugins.callback(routes.close)
        for route in routes.routes():
            self.table.add(route)
        gc.collect()
        gc.freeze()  # garbage collections then skip the objects created at startup
        slot.put(llm)
        self._batches.wake()

    def _announce(self, loading: asyncio.Task[None], drain: Drain, lead: Lead | None) -> None:
        """Announce that the server is ready. If it could not start, shut it down."""
        if loading.cancelled() or loading.exception() is not None:
            drain.handle_signal()
        elif lead is None:
            log_ready(self._state, self._listeners)
        else:
            lead.announce()

    def _uvicorn_config(self, application: Application) -> uvicorn.Config:
        settings = self._state.settings
        config = uvicorn.Config(
            application,  # type: ignore[arg-type]  # uvicorn's types are stricter than ASGI
            http=limited_protocol(settings),
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=max(1, round(settings.keep_alive_s)),
            timeout_graceful_shutdown=1,
            backlog=BACKLOG,
        )
        config.load()
        config.ssl = self._tls
        return config


def _add_batches(
    table: RouteTable, state: ServerState, database: Database, probe: LoopProbe
) -> BatchRunner:
    """Add the routes of files and batches to a table, and return the batch runner."""
    files, batches = FileStore(database, state.settings), BatchStore(database, state.settings)
    calls = InternalCalls(table, state, probe)
    runner = BatchRunner(state, database, (batches, files), calls)
    for route in (
        *file_routes(files, state.settings),
        *batch_routes(state, batches, files, runner),
    ):
        table.add(route)
    return runner


class _QuietServer(uvicorn.Server):
    """uvicorn's server without signal handlers, because `Drain` handles the signals."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Do not handle signals, because `Drain` handles them."""
        return nullcontext()


async def _finish_loading(loading: asyncio.Task[None], drain: Drain) -> None:
    """Wait for an engine that is being loaded. Raise its error. A second signal ends the process.

    A thread loads the engine and cannot be interrupted; the engine's process ends with this one.
    """
    forced = asyncio.create_task(drain.forced.wait())
    await asyncio.wait([loading, forced], return_when=asyncio.FIRST_COMPLETED)
    forced.cancel()
    if not loading.done():
        logger.warning("The server exits while the model is still being loaded.")
        os._exit(1)
    await loading
