"""A child process that measures the host time of Dovetail's step, as `step_overhead.py` does."""

from __future__ import annotations

from typing import Any

import step_overhead

from peers.serving import serve


def measure(num_requests: int) -> dict[str, Any]:
    """Return the milliseconds per step for a number of decoding requests: median, p10, p90."""
    return step_overhead.measure(num_requests)


if __name__ == "__main__":
    serve({"measure": measure})
