"""What a supervisor goes by: limits and delays, all in seconds, and the states that it tells."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EngineState(StrEnum):
    """How a supervised engine is.

    READY: it lives and its steps go on. STALLED: it lives and shows no sign of it, or a step does
    not end; it may come back. RESTARTING: it died, and another one is being started. DEAD: it is
    not started again.
    """

    READY = "ready"
    STALLED = "stalled"
    RESTARTING = "restarting"
    DEAD = "dead"


@dataclass(frozen=True, kw_only=True)
class SupervisionRules:
    """When an engine counts as stalled, when it is killed for it, and when it is started again.

    max_restarts: within `window_s`; the next death is final. first_delay_s, max_delay_s: before a
    restart; doubled from one to the next within the window.
    max_silence_s: an engine that shows no life for longer is STALLED; kill_silence_s: and killed.
    max_step_s: likewise for a step that does not end; kill_step_s: it is killed for that.
    max_deaths: how many engines may die with a request under way before its id is refused.
    """

    max_restarts: int = 5
    window_s: float = 600.0
    first_delay_s: float = 0.1
    max_delay_s: float = 10.0
    max_silence_s: float = 4.0
    kill_silence_s: float = 30.0
    max_step_s: float = 120.0
    kill_step_s: float = 600.0
    max_deaths: int = 2
