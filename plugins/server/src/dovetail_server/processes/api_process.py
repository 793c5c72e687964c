"""The program of an API process: a server that is attached to the engine of the main process."""

from __future__ import annotations

import asyncio
import queue
import signal
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from dovetail.engine.async_llm import AsyncLLM
from dovetail.errors import ConfigError, EngineDeadError
from dovetail.processes.log_output import configure_logs
from dovetail_server.lifecycle.shutdown import Drain
from dovetail_server.processes.messages import (
    Answer,
    DrainNow,
    Ended,
    EngineEvent,
    Question,
    Serving,
    Start,
    receive,
    send,
)
from dovetail_server.processes.siblings import Siblings
from dovetail_server.server import Listeners, Server, make_state
from dovetail_server.settings import ServerSettings
from dovetail_server.state import ServerState

if TYPE_CHECKING:
    from dovetail.processes.child_main import ChildContext


def main(context: ChildContext) -> int:
    """Serve until the main process requests the drain. The entry point of an API process."""
    for item in (signal.SIGTERM, signal.SIGINT):
        signal.signal(item, signal.SIG_IGN)  # the main process decides
    start = msgspec.json.decode(context.settings, type=Start)
    settings = msgspec.convert(start.settings, ServerSettings)
    configure_logs(settings.log_level, settings.log_format, more=("dovetail_server",))
    sockets = [
        None if number is None else socket.socket(fileno=number)
        for number in (start.public, start.admin, start.control)
    ]
    public, admin, channel = sockets
    assert public is not None and channel is not None
    siblings = Siblings(channel)
    state = make_state(settings, start.served_model_name, siblings)
    lead = Lead(channel, state, siblings, replaces_another=start.replaces_another)
    server = Server(state, Listeners(public=public, admin=admin))
    complete = server.serve(lead.attach, lead) == 0
    send(channel, Ended(complete))
    return 0


class Lead:
    """The main process, as seen by an API process.

    replaces_another: whether this process replaces an API process that has exited.
    """

    def __init__(
        self,
        channel: socket.socket,
        state: ServerState,
        siblings: Siblings,
        *,
        replaces_another: bool,
    ) -> None:
        channel.setblocking(False)
        self.replaces_another = replaces_another
        self._channel = channel
        self._state = state
        self._slot = state.slot
        self._max_waiting = state.settings.max_waiting
        self._siblings = siblings
        self._addresses: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._address = ""
        self._following: asyncio.Task[None] | None = None

    def follow(self, drain: Drain) -> None:
        """Handle the messages of the main process from now on."""
        asyncio.get_running_loop().add_reader(self._channel, self._read, drain)

    def announce(self) -> None:
        """Report that this process serves requests."""
        send(self._channel, Serving())

    def attach(self) -> AsyncLLM:
        """Wait for an address of the engine and attach to it. Blocks."""
        while address := self._addresses.get():
            with suppress(EngineDeadError, ConfigError):  # it has exited; wait for the next one
                return AsyncLLM.attach(address, max_waiting=self._max_waiting)
        raise EngineDeadError("the server was stopped before the engine was ready.")

    def _read(self, drain: Drain) -> None:
        try:
            while (message := receive(self._channel)) is not None:
                if isinstance(message, EngineEvent):
                    self._hear(message)
                elif isinstance(message, DrainNow):
                    self._addresses.put("")
                    drain.handle_signal()
                elif isinstance(message, Question):
                    send(self._channel, Answer(message.number, self._answer(message)))
                elif isinstance(message, Answer):
                    self._siblings.receive(message)
        except EOFError:  # this process is about to be killed
            asyncio.get_running_loop().remove_reader(self._channel)

    def _answer(self, question: Question) -> int:
        if question.counts:
            return self._state.admission.num_running
        return self._state.abort(question.ids, question.everything)

    def _hear(self, news: EngineEvent) -> None:
        self._slot.reported_problem = news.problem
        if not news.address or news.address == self._address:
            return
        self._address = news.address
        if self._slot.is_loaded:
            self._following = asyncio.create_task(self._follow(news.address))
        else:
            self._addresses.put(news.address)

    async def _follow(self, address: str) -> None:
        """Attach to the next process of the engine."""
        with suppress(EngineDeadError, ConfigError):  # it has exited, too
            self._slot.replace(
                await asyncio.to_thread(AsyncLLM.attach, address, max_waiting=self._max_waiting)
            )
