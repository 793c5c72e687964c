"""The main process of a server with several API processes: owns the engine, starts the others."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict

import msgspec
import uvloop

from dovetail.engine.async_llm import AsyncLLM
from dovetail.processes.child_process import ChildProcess, error_of, start_child
from dovetail.transport.packets import packet_pair
from dovetail_server.lifecycle.shutdown import SIGNALS
from dovetail_server.processes.messages import (
    Answer,
    DrainNow,
    Ended,
    EngineEvent,
    Message,
    Question,
    Serving,
    Start,
    receive,
    send,
)
from dovetail_server.processes.siblings import Asker, Questions
from dovetail_server.server import Listeners
from dovetail_server.state import ServerState

logger = logging.getLogger(__name__)

ENTRY = "dovetail_server.processes.api_process:main"
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 10.0
LONG_LIFE_S = 60.0
"""Run time after which the restart delay of an API process returns to the first delay."""
END_S = 10.0
"""How long API processes may take to exit after their drain."""
_POLL_S = 0.05


class APIProcess(Asker):
    """One API process. is_serving: whether it serves requests.

    complete: whether it drained completely; None while it runs.
    """

    def __init__(self, child: ChildProcess, channel: socket.socket, born_s: float) -> None:
        self.child = child
        self.is_serving = False
        self.complete: bool | None = None
        self.born_s = born_s
        self._channel = channel

    def send(self, message: Message) -> None:
        """Send a message to the API process."""
        send(self._channel, message)

    def follow(self, listener: Callable[[APIProcess, Question | Answer], None]) -> None:
        """Process the API process's messages from now on. Forward questions and responses."""
        self._listener = listener
        asyncio.get_running_loop().add_reader(self._channel, self.read)

    def read(self) -> None:
        """Process the messages that the API process has sent."""
        try:
            while (message := receive(self._channel)) is not None:
                if isinstance(message, Serving):
                    self.is_serving = True
                elif isinstance(message, Ended):
                    self.complete = message.complete
                elif isinstance(message, Question | Answer):
                    self._listener(self, message)
        except EOFError:
            asyncio.get_running_loop().remove_reader(self._channel)

    def close(self) -> None:
        """Terminate the API process if it runs, and release its resources."""
        asyncio.get_running_loop().remove_reader(self._channel)
        self.child.close()
        self._channel.close()


class Supervisor:
    """Runs the engine and the API processes, and restarts API processes that exit."""

    def __init__(
        self, state: ServerState, listeners: Listeners, announce: Callable[[], None]
    ) -> None:
        """announce: called once, when all API processes serve requests."""
        self._state = state
        self._listeners = listeners
        self._announce = announce
        self._places: list[APIProcess | None] = [None] * state.settings.api_processes
        self._starts_s = [0.0] * len(self._places)
        self._delays_s = [FIRST_DELAY_S] * len(self._places)
        self._questions = Questions()
        self._news = EngineEvent(address="", problem="loading")
        self._num_signals = 0
        self._is_announced = False

    def serve(self, make: Callable[[], AsyncLLM]) -> int:
        """Serve until a signal. Return the exit code. make: creates the engine, in a thread.

        Raises the error of an engine or API process that could not start.
        """
        return uvloop.run(self.run(make))

    async def run(self, make: Callable[[], AsyncLLM]) -> int:
        """Serve until a signal arrives. Return the exit code."""
        loop = asyncio.get_running_loop()
        for item in SIGNALS:
            loop.add_signal_handler(item, self._handle_signal)
        try:
            self._keep_running()
            llm = await self._load(make)
            while not self._num_signals:
                await self._supervise(llm)
                await asyncio.sleep(_POLL_S)
            return 0 if await self._drain() else 1
        finally:
            for process in self._running():
                process.close()
            await asyncio.to_thread(self._state.slot.shutdown)
            logger.info("The server has shut down.")

    def _handle_signal(self) -> None:
        self._num_signals += 1

    async def _load(self, make: Callable[[], AsyncLLM]) -> AsyncLLM:
        """Load the engine. A second signal ends the process."""
        slot = self._state.slot
        loading = asyncio.create_task(slot.load(make))
        while not loading.done():
            if self._num_signals > 1:
                logger.warning("The server exits while the model is still being loaded.")
                os._exit(1)
            await asyncio.wait([loading], timeout=_POLL_S)
        llm = await loading
        slot.put(llm)
        return llm

    async def _supervise(self, llm: AsyncLLM) -> None:
        """Send the engine's state to the API processes, and restart processes that have exited."""
        problem = await self._state.slot.problem()
        news = EngineEvent(address="" if problem else llm.address, problem=problem)
        if news != self._news:
            self._news = news
            self._notify(news)
        self._bury()
        self._keep_running()
        if not self._is_announced and all(slot and slot.is_serving for slot in self._places):
            self._is_announced = True
            self._announce()

    def _notify(self, message: Message) -> None:
        for process in self._running():
            process.send(message)

    def _running(self) -> Iterator[APIProcess]:
        return (slot for slot in self._places if slot is not None)

    def _bury(self) -> None:
        """Release API processes that have exited. Raise the error of one that cannot start."""
        now_s = asyncio.get_running_loop().time()
        for index, process in enumerate(self._places):
            if process is None:
                continue
            process.read()
            if not process.child.has_ended():
                continue
            report = process.child.receive()
            end = process.child.describe_end()
            process.close()
            self._places[index] = None
            self._questions.forget(process)
            if report is not None and report.kind == "failed" and not self._is_announced:
                raise error_of(report)
            delay_s = self._delays_s[index]
            if now_s - process.born_s > LONG_LIFE_S:
                delay_s = FIRST_DELAY_S
            self._starts_s[index] = now_s + delay_s
            self._delays_s[index] = min(2 * delay_s, MAX_DELAY_S)
            cause = "" if report is None else f": {error_of(report)}"
            logger.error("API process %d ended %s%s. It will be restarted.", index, end, cause)

    def _keep_running(self) -> None:
        """Start the API processes that are not running."""
        now_s = asyncio.get_running_loop().time()
        for index, process in enumerate(self._places):
            if process is None and now_s >= self._starts_s[index]:
                self._places[index] = self._start(index, now_s)

    def _start(self, index: int, now_s: float) -> APIProcess:
        parent_end, child_end = packet_pair()
        parent_end.setblocking(False)
        public, admin = self._listeners.public, self._listeners.admin
        start = Start(
            settings=asdict(self._state.settings),
            served_model_name=self._state.slot.served_model_name,
            control=child_end.fileno(),
            public=public.fileno(),
            admin=None if admin is None else admin.fileno(),
            replaces_another=self._is_announced,
        )
        sockets = [item for item in (child_end, public, admin) if item is not None]
        with child_end:
            child = start_child(
                ENTRY,
                msgspec.json.encode(start),
                name=f"API process {index}",
                descriptors=[item.fileno() for item in sockets],
            )
        process = APIProcess(child, parent_end, now_s)
        process.follow(self._pass_on)
        process.send(self._news)
        return process

    def _pass_on(self, sender: APIProcess, message: Question | Answer) -> None:
        """Forward a question to the other API processes, or a response to the asking process."""
        if isinstance(message, Answer):
            self._questions.answer(sender, message)
            return
        others = (item for item in self._running() if item is not sender and item.is_serving)
        self._questions.ask(sender, message, others)

    async def _drain(self) -> bool:
        """Let the running requests finish. Return whether none of them was aborted."""
        for item in (self._listeners.public, self._listeners.admin):
            if item is not None:
                item.close()
        num_sent = 0
        settings, loop = self._state.settings, asyncio.get_running_loop()
        deadline = loop.time() + settings.drain_timeout_s + END_S
        while any(not item.child.has_ended() for item in self._running()):
            while num_sent < min(self._num_signals, 2):
                self._notify(DrainNow())
                num_sent += 1
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(_POLL_S)
        for process in self._running():
            process.read()
        return all(item.complete for item in self._running())
