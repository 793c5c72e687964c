"""`SupervisedChannel`: a channel that outlives its engine, for every client.

When the engine dies, the requests under way end with an error among the outputs, calls are answered
with UnavailableError, and another engine is started; until it is ready, calls raise
UnavailableError, and outputs are waited for. EngineDeadError comes when no more is started.
"""

from __future__ import annotations

from collections.abc import Callable

from dovetail.clock import Clock
from dovetail.engine.channel import Call, Channel, EngineState, Progress, Received
from dovetail.engine.process.channel import ProcessChannel
from dovetail.engine.supervision.rules import SupervisionRules
from dovetail.engine.supervision.supervisor import Supervisor
from dovetail.engine.supervision.work import Work
from dovetail.errors import DovetailError, EngineDeadError, UnavailableError
from dovetail.interfaces import PauseScope


class SupervisedChannel(Channel):
    """The channel to one engine after the other. A new engine is paused as the last one was.

    facts: of the first engine; the others are made from the same configuration.
    """

    def __init__(
        self,
        start: Callable[[], ProcessChannel],
        rules: SupervisionRules,
        *,
        clock: Clock | None = None,
    ) -> None:
        """Start the first engine; raise the DovetailError that its start raised."""
        self._work = Work(rules, clock)
        self._supervisor = Supervisor(start, self._work, rules, clock=clock)
        self.facts = self._supervisor.channel().facts

    def send(self, call: Call) -> None:
        """Send a call to the engine that runs.

        Raises RequestError also for a request that engines have died with, UnavailableError while
        there is no engine.
        """
        channel = self._supervisor.channel()
        call = self._work.begin(call)
        try:
            channel.send(call)
        except EngineDeadError as error:
            self._work.withdraw(call)
            self._supervisor.lose(channel, error)
            raise UnavailableError(
                f"The engine died during the call and is started again: {error}"
            ) from error
        except DovetailError:
            self._work.withdraw(call)
            raise
        if not self._supervisor.is_current(channel) and self._work.withdraw(call):
            raise UnavailableError("The engine died during the call and is started again.")

    def receive(self, timeout_s: float | None = None) -> Received | None:
        """Return the next reply or outputs, or the end of what an engine died with."""
        return self._supervisor.receive(timeout_s)

    def acknowledge(self) -> None:
        """Note that outputs were taken."""
        channel = self._supervisor.find_channel()
        if channel is not None:
            channel.acknowledge()

    def close(self) -> None:
        """End the engine, and start no more."""
        self._supervisor.shutdown()

    def wait_until_ready(self, timeout_s: float | None = None) -> bool:
        """Wait for an engine; return whether there is one. Raises EngineDeadError for none."""
        return self._supervisor.wait(timeout_s)

    @property
    def error(self) -> DovetailError | None:
        """Why no engine is started any more, or None."""
        return self._supervisor.error

    @property
    def state(self) -> EngineState:
        """How the engine is."""
        return self._supervisor.state

    @property
    def paused(self) -> PauseScope | None:
        """How far the engine is paused, or the next one will be."""
        channel = self._supervisor.find_channel()
        return self._supervisor.paused if channel is None else channel.paused

    @property
    def progress(self) -> Progress:
        """How far the engine that runs has come; nothing while there is none."""
        channel = self._supervisor.find_channel()
        return Progress() if channel is None else channel.progress

    @property
    def num_restarts(self) -> int:
        """How many engines were started after the first."""
        return self._supervisor.num_restarts

    @property
    def process_id(self) -> int:
        """The id of the process of the engine that runs."""
        return self._supervisor.channel().process_id

    @property
    def address(self) -> str:
        """Where other processes can attach to the engine that runs; another one after a restart."""
        return self._supervisor.channel().address
