"""Checks for starvation: a request must not wait forever because equal requests arrive later.

The scheduler always has requests to run, and they differ only in their arrival. No policy has a
reason to prefer newer requests, so each request must end after a limited number of steps. This
module uses only the contract of the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from dovetail.interfaces.scheduler import SchedulerLimits
from dovetail_devkit.expectation import expect
from dovetail_devkit.scheduler.program import SchedulerDriver

MakeDriver = Callable[[SchedulerLimits], SchedulerDriver]
AddRequest = Callable[[SchedulerDriver, str], None]

NUM_EXTRA = 2
"""Number of early requests that must wait for a batch slot."""
MAX_SERVED = 40
"""Maximum number of later requests that may end before the early requests."""

_BATCH_SLOTS = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=32)

SHORTAGES: Mapping[str, SchedulerLimits] = {
    "batch slots": _BATCH_SLOTS,
    "tokens": replace(_BATCH_SLOTS, max_num_seqs=3, max_num_batched_tokens=4),
}
"""Limits that make each resource too small for all requests, by resource."""


def check_nobody_starves(make: MakeDriver, add: AddRequest) -> None:
    """Check that early requests end, although equal requests keep arriving."""
    for shortage, limits in SHORTAGES.items():
        driver = make(limits)
        first = [f"first-{number}" for number in range(limits.max_num_seqs + NUM_EXTRA)]
        for name in first:
            add(driver, name)
        num_later = num_served = 0
        while num_served < MAX_SERVED and not driver.alive.keys().isdisjoint(first):
            driver.schedule()
            for ending in driver.settle().finished:
                num_served += ending.request_id not in first
                add(driver, f"later-{num_later}")
                num_later += 1
        starving = sorted(driver.alive.keys() & set(first))
        expect(
            not starving,
            f"requests starve when there are not enough {shortage}: {', '.join(starving)} have "
            f"not ended, but {num_served} equal requests that arrived later have ended",
        )
        driver.abort(list(driver.alive))
        driver.drain()
