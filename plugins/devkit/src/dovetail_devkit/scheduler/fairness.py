"""Checks for starvation: no request waits forever behind equal requests that arrive later.

A stream of requests that differ only in their arrival keeps the scheduler busy. No policy has a
reason to prefer newer requests, so each request must end in bounded time. Uses only the contract of
the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from dovetail.interfaces.scheduler import SchedulerLimits
from dovetail_devkit.expectation import expect
from dovetail_devkit.scheduler.program import Referee

MakeReferee = Callable[[SchedulerLimits], Referee]
AddRequest = Callable[[Referee, str], None]

NUM_EXTRA = 2
"""Number of first requests that must wait for a seat."""
MOST_SERVED = 40
"""Number of later requests that may end before the first requests."""

_SEATS = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=32)

SHORTAGES: Mapping[str, SchedulerLimits] = {
    "seats": _SEATS,
    "tokens": replace(_SEATS, max_num_seqs=3, max_num_batched_tokens=4),
}
"""Limits under which a resource is too small for all requests, by the name of the resource."""


def check_nobody_starves(make: MakeReferee, add: AddRequest) -> None:
    """Check that the first requests end while equal requests keep arriving."""
    for shortage, limits in SHORTAGES.items():
        referee = make(limits)
        first = [f"first-{number}" for number in range(limits.max_num_seqs + NUM_EXTRA)]
        for name in first:
            add(referee, name)
        num_later = num_served = 0
        while num_served < MOST_SERVED and not referee.alive.keys().isdisjoint(first):
            referee.schedule()
            for ending in referee.settle().finished:
                num_served += ending.request_id not in first
                add(referee, f"later-{num_later}")
                num_later += 1
        starving = sorted(referee.alive.keys() & set(first))
        expect(
            not starving,
            f"requests starve when there are not enough {shortage}: {', '.join(starving)} have "
            f"not ended, but {num_served} equal requests that arrived later have ended",
        )
        referee.abort(list(referee.alive))
        referee.drain()
