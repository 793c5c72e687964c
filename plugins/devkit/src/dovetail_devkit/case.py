"""One check of a suite, by name: what a suite is a list of, and what a test runner shows.

Depends on no plugin and no runner: `check_<kind>` runs all cases of a suite, and the pytest plugin
makes each a test of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Case:
    """One check.

    name: readable, and unique in its suite. run: raises AssertionError with the law that is broken,
    and NotHere where the case has no meaning.
    """

    name: str
    run: Callable[[], None]


def run_all(cases: Iterable[Case]) -> None:
    """Run `cases` in order; the first broken law ends it."""
    for case in cases:
        case.run()
