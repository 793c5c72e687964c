"""Checks every claim of docs/features.md: `python tests/features/prove.py [--faults | --fakes]`.

Every linked test of a row with a claim must pass and must not be skipped: in the recorded run of
`make test` if that run tested this state of the files, otherwise in a separate run. `make test`
runs only some of the costly tests; if it ran no test of a row, the first test of the row is run
now. Then faults from `wiring_faults.toml` (a dropped option, a zeroed statistic) are planted one by
one, and a linked test must fail with each of them. The commit hash selects one in `SAMPLED` of the
faults. If a row names a kind, the tests must also fail with the contract's fake instead of every
implementation (`pytest --with-fake KIND`); the commit selects some of those that are costly. `make
soak` plants all faults (`--faults`), and runs all tests with the fakes (`--fakes`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from hashlib import sha256

from suite import NOT_SELECTED, SOME_COSTLY, Outcomes, commit, recorded, run_tests
from table import Feature, read_features
from wiring_trial import WiringFault, read_faults, try_faults

SAMPLED = 20
"""`make features` tries one in this number of faults."""


def unproven(features: list[Feature], known: Outcomes | None) -> list[str]:
    """Return the claims that are not proven, with the reason, one sentence each.

    known: outcomes of the whole suite; with None, the linked tests are run.
    """
    claimed = [feature for feature in features if feature.status != "planned"]
    problems = [
        f"{row.id}: {row.status}, but no test is linked" for row in claimed if not row.tests
    ]
    actual = known
    if actual is None:
        actual, _ = run_tests(sorted({test for row in claimed for test in row.tests}))
    skipped = [row.tests[0] for row in claimed if row.tests and not _was_run(row, actual)]
    if known is not None and skipped:
        actual = known | run_tests(sorted(set(skipped)))[0]
    for row in claimed:
        seen = {test: ", ".join(sorted(actual.get(test, ()))) or "not found" for test in row.tests}
        accepted = ("passed", NOT_SELECTED) if "passed" in seen.values() else ("passed",)
        problems += [
            f"{row.id}: {test}: {outcome}"
            for test, outcome in seen.items()
            if outcome not in accepted
        ]
    return problems


def passing_with_fakes(features: Sequence[Feature], *options: str) -> list[str]:
    """Return the tests that pass with the fake of a kind of their row, one sentence each.

    options: SOME_COSTLY to run only some of the costly tests.
    """
    claimed = [feature for feature in features if feature.status != "planned"]
    problems = []
    for kind in sorted({kind for row in claimed for kind in row.fakes}):
        rows = [row for row in claimed if kind in row.fakes]
        tests = sorted({test for row in rows for test in row.tests})
        with_fake, _ = run_tests(tests, f"--with-fake={kind}", *options)
        problems += [
            f"{row.id}: {test} passes with the fake of {kind} instead of the implementation"
            for row in rows
            for test in row.tests
            if not with_fake.get(test, set()) & {"failed", NOT_SELECTED}
        ]
    return problems


def _was_run(row: Feature, outcomes: Outcomes) -> bool:
    """Return whether a linked test was run, or is unknown."""
    return any(outcomes.get(test) != {NOT_SELECTED} for test in row.tests)


def misplaced_faults(features: Sequence[Feature], faults: Sequence[WiringFault]) -> list[str]:
    """Return the faults that cannot be tried and the claims without a fault, one sentence each.

    Each row with a claim needs a fault. Each fault needs a row that links its test, and code that
    it changes.
    """
    tests = {row.id: row.tests for row in features if row.status != "planned"}
    problems = [
        f"{row}: has no fault that tests its wiring; add one to tests/features/wiring_faults.toml"
        for row in sorted(tests.keys() - {fault.feature for fault in faults})
    ]
    for fault in faults:
        if fault.test.partition("[")[0] not in tests.get(fault.feature, ()):
            problems.append(f"{fault.feature}: the row does not link {fault.test}")
        if problem := fault.problem():
            problems.append(f"{fault.feature}: {problem}")
    return problems


def sample_of(faults: Sequence[WiringFault], commit: bytes) -> list[WiringFault]:
    """Return one in `SAMPLED` of the faults, selected by the commit hash."""
    ordered = sorted(faults, key=lambda fault: sha256(commit + fault.name.encode()).digest())
    return ordered[: -(-len(ordered) // SAMPLED)]


def unnoticed_faults(faults: Sequence[WiringFault]) -> list[str]:
    """Try the faults. Return one sentence for each fault that made no test fail."""
    return [
        f"{fault.feature}: {fault.name}, and {fault.test} {verdict}"
        for fault, verdict in try_faults(fault for fault in faults if not fault.problem())
        if verdict != "failed"
    ]


def main(arguments: Sequence[str]) -> int:
    """Print the unproven claims, or how many are proven. Return 1 if a claim is unproven."""
    if arguments not in ([], ["--faults"], ["--fakes"]):
        print(__doc__)
        return 2
    features = read_features()
    faults = read_faults()
    problems = misplaced_faults(features, faults)
    if arguments:
        by_faults = arguments == ["--faults"]
        problems += unnoticed_faults(faults) if by_faults else passing_with_fakes(features)
        what = f"{len(faults)} faults" if by_faults else "all fakes"
        print(*problems, f"{what} tried; {len(problems)} problems", sep="\n")
        return bool(problems)
    known = recorded()
    tried = sample_of(faults, commit())
    problems += unnoticed_faults(tried) + unproven(features, known)
    problems += passing_with_fakes(features, SOME_COSTLY)
    for problem in problems:
        print(problem)
    count = {
        status: sum(row.status == status for row in features)
        for status in ("works", "in part", "planned")
    }
    source = "a separate run" if known is None else "the run of `make test` on this tree"
    print(
        f"features: {count}, {len(tried)} of {len(faults)} faults tried; {len(problems)} unproven, "
        f"by {source}"
    )
    return bool(problems)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
