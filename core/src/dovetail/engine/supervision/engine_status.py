"""How a supervised engine is, whatever client asks: state, restarts, the last error, progress."""

from __future__ import annotations

from typing import Generic

from dovetail.engine.process.engine_process import Progress
from dovetail.engine.supervision.rules import EngineState
from dovetail.engine.supervision.supervisor import C, Supervisor
from dovetail.errors import DovetailError, EngineDeadError, UnavailableError


class EngineStatus(Generic[C]):
    """What the supervised clients tell of their engine without asking it."""

    _supervisor: Supervisor[C]

    @property
    def state(self) -> EngineState:
        """How the engine is; `READY` is what a load balancer asks for. From any thread."""
        return self._supervisor.state

    @property
    def num_restarts(self) -> int:
        """How many engines were started after the first."""
        return self._supervisor.num_restarts

    @property
    def error(self) -> DovetailError | None:
        """Why no engine is started any more, or None."""
        return self._supervisor.error

    @property
    def progress(self) -> Progress:
        """How far the engine that runs has come; nothing while there is none."""
        try:
            return self._supervisor.client().progress
        except (EngineDeadError, UnavailableError):
            return Progress()
