"""`SupervisedChannel`: a channel that continues with another engine when its engine fails.

When the engine fails, unfinished requests end with an error in the outputs, calls without a reply
get UnavailableError, and another engine is started. Until it is ready, calls raise
UnavailableError, and `receive` waits. If no restart is left, calls raise EngineDeadError.
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
    """The channel to successive engines. A new engine is paused if the previous one was.

    facts: the properties of the first engine; later engines have the same configuration.
    """

    def __init__(
        self,
        start: Callable[[], ProcessChannel],
        rules: SupervisionRules,
        *,
        clock: Clock | None = None,
    ) -> None:
        """Start the first engine. Raise a DovetailError if its startup fails."""
        self._work = Work(rules, clock)
        self._supervisor = Supervisor(start, self._work, rules, clock=clock)
        self.facts = self._supervisor.channel().facts

    def send(self, call: Call) -> None:
        """Send a call to the running engine.

        Raises RequestError also for a request that is rejected because it has crashed engines, and
        UnavailableError while no engine runs.
        """
        channel = self._supervisor.channel()
        call = self._work.begin(call)
        try:
            channel.send(call)
        except EngineDeadError as error:
            self._work.discard(call)
            self._supervisor.lose(channel, error)
            raise UnavailableError(
                f"The engine failed during the call and is being restarted: {error}"
            ) from error
        except DovetailError:
            self._work.discard(call)
            raise
        if not self._supervisor.is_current(channel) and self._work.discard(call):
            raise UnavailableError("The engine failed during the call and is being restarted.")

    def receive(self, timeout_s: float | None = None) -> Received | None:
        """Return the next reply or outputs, or the ends of requests of a failed engine."""
        return self._supervisor.receive(timeout_s)

    def acknowledge(self) -> None:
        """Record that the caller has taken outputs."""
        channel = self._supervisor.find_channel()
        if channel is not None:
            channel.acknowledge()

    def close(self) -> None:
        """Shut down the engine, and stop restarts."""
        self._supervisor.shutdown()

    def wait_until_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until an engine is ready. Return False after the timeout.

        Raises EngineDeadError if it failed.
        """
        return self._supervisor.wait(timeout_s)

    @property
    def error(self) -> DovetailError | None:
        """The reason why the engine is not restarted, or None."""
        return self._supervisor.error

    @property
    def state(self) -> EngineState:
        """The state of the engine."""
        return self._supervisor.state

    @property
    def paused(self) -> PauseScope | None:
        """The scope of the pause of this engine, or of the next one."""
        channel = self._supervisor.find_channel()
        return self._supervisor.paused if channel is None else channel.paused

    @property
    def progress(self) -> Progress:
        """The progress of the running engine. All zeros while none runs."""
        channel = self._supervisor.find_channel()
        return Progress() if channel is None else channel.progress

    @property
    def num_restarts(self) -> int:
        """Number of restarts of the engine."""
        return self._supervisor.num_restarts

    @property
    def process_id(self) -> int:
        """The process id of the running engine."""
        return self._supervisor.channel().process_id

    @property
    def address(self) -> str:
        """The address of the running engine for other processes. Changes with a restart."""
        return self._supervisor.channel().address
