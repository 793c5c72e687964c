"""The rules of a supervisor: limits and delays, all in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from dovetail.errors import UserError

_MINIMUM = {"max_restarts": 0, "max_deaths": 1}


@dataclass(frozen=True, kw_only=True)
class SupervisionRules:
    """The rules by which a supervisor detects a stall, and kills and restarts an engine.

    max_restarts: maximum number of restarts within `window_s`; the next failure is final. A failure
    that is attributed to a request does not count, unless this is 0; see `crash_tracker`.
    first_delay_s, max_delay_s: first and maximum delay of a restart; the delay doubles at each
    restart within the window.
    max_silence_s: an engine without heartbeats for longer is STALLED; kill_silence_s: an engine
    without heartbeats for longer is killed.
    max_step_s, kill_step_s: the same limits for the duration of a step.
    max_deaths: a request is suspected after this many engine failures during which it was
    unfinished, and rejected after a failure for which it is the only suspect; see `crash_tracker`.
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

    def __post_init__(self) -> None:
        """Raise UserError, naming the rule, for an invalid value."""
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in _MINIMUM:
                right = type(value) is int and value >= _MINIMUM[name]
                expected = f"an integer of at least {_MINIMUM[name]}"
            else:
                right = type(value) in (int, float) and 0 < value < math.inf
                expected = "a positive number of seconds"
            if not right:
                raise UserError(f"{name}={value!r} must be {expected}.")
        for first, last in (
            ("first_delay_s", "max_delay_s"),
            ("max_silence_s", "kill_silence_s"),
            ("max_step_s", "kill_step_s"),
        ):
            if getattr(self, first) > getattr(self, last):
                raise UserError(
                    f"{first}={getattr(self, first)} is longer than {last}={getattr(self, last)}."
                )
