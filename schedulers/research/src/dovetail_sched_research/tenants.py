"""The numbers that a policy stores for each tenant, in limited memory.

Clients choose the names of tenants, so a policy must not store a number for every name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Set

MAX_IDLE_TENANTS = 4096
"""Number of idle tenants above which some are forgotten."""


def forget_idle(
    numbers: defaultdict[str, float], active: Set[str], *, gain: Callable[[float], float]
) -> None:
    """Remove half of the idle tenants if there are too many: those that gain the least.

    active: the tenants that are not idle. gain: returns the advantage that a tenant gets if its
    number is replaced by 0.
    """
    if len(numbers) <= MAX_IDLE_TENANTS + 2 * len(active):
        return
    idle = sorted(numbers.keys() - active, key=lambda name: (gain(numbers[name]), name))
    for name in idle[: len(idle) // 2]:
        del numbers[name]
