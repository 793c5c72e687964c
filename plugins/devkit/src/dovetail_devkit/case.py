"""A suite consists of cases, which are named checks.

This module does not depend on a plugin or a test runner. `check_<kind>` runs all cases of a suite;
the pytest plugin turns each case into a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Case:
    """One check.

    name: a readable name, unique in its suite. run: a function that raises AssertionError with the
    violated rule, or SkipCase if the case does not apply to the plugin or the machine.
    """

    name: str
    run: Callable[[], None]


def run_all(cases: Iterable[Case]) -> None:
    """Run `cases` in order. Stop at the first violated rule."""
    for case in cases:
        case.run()
