"""Learns the duration of steps from the times at which they are planned."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces import RequestView

MIN_CHUNK = 64
"""Minimum for `max_prompt_tokens`. Steps with fewer prompt tokens count as decode steps."""

_GAIN = 0.1
"""The weight of a new step in the moving averages."""


class StepEstimate:
    """Estimates how long a step takes: `decode_ns`, plus `token_ns` for each prompt token."""

    def __init__(self) -> None:
        self.decode_ns = 0.0
        self.token_ns = 0.0
        self._begun_ns = 0
        self._num_prompt_tokens = 0
        self._served: set[int] = set()

    def begin(self, now_ns: int, num_prompt_tokens: int, served: set[int]) -> None:
        """Record a step that is being planned. served: the sequence numbers of its requests."""
        self._begun_ns, self._num_prompt_tokens, self._served = now_ns, num_prompt_tokens, served

    def learn(self, running: Sequence[RequestView], now_ns: int) -> None:
        """Learn from the last step if one of its requests still runs.

        Otherwise the engine may have been idle since then.
        """
        if not any(item.sequence in self._served for item in running):
            return
        duration_ns, count = now_ns - self._begun_ns, self._num_prompt_tokens
        if count < MIN_CHUNK:
            self.decode_ns = _moved(self.decode_ns, duration_ns - count * self.token_ns)
        else:
            self.token_ns = _moved(self.token_ns, (duration_ns - self.decode_ns) / count)

    def max_prompt_tokens(self, step_ns: float) -> int:
        """Return how many prompt tokens fit in a step. `token_ns` must be known."""
        return max(MIN_CHUNK, int((step_ns - self.decode_ns) / self.token_ns))


def _moved(value: float, observed: float) -> float:
    """Return the moving average after one more observed value."""
    observed = max(0.0, observed)
    return value + _GAIN * (observed - value) if value else observed
