"""Holds docs/features.md to its word: `python tests/features/prove.py`, a step of CI.

Every linked test of a row that claims something has to pass, and not by being skipped: in the run
that `make test` has recorded, if that was a run of this very tree, otherwise in one of its own.
Then the tests of each row that names a kind are run again with that contract's fake in the place of
every implementation (`pytest --with-fake KIND`): there, each of them has to fail, for a test that
cannot tell an implementation from a fake shows nothing.
"""

from __future__ import annotations

from suite import Outcomes, recorded, run_tests
from table import Feature, read_features


def unproven(features: list[Feature], known: Outcomes | None) -> list[str]:
    """Return what is wrong with the claims, each a sentence.

    known: outcomes of the whole suite; None: the linked tests are run.
    """
    claimed = [feature for feature in features if feature.status != "planned"]
    problems = [
        f"{row.id}: {row.status}, but no test is linked" for row in claimed if not row.tests
    ]
    found = known
    if found is None:
        found, _ = run_tests(sorted({test for row in claimed for test in row.tests}))
    for row in claimed:
        for test in row.tests:
            seen = ", ".join(sorted(found.get(test, ()))) or "not found"
            if seen != "passed":
                problems.append(f"{row.id}: {test}: {seen}")
    for kind in sorted({kind for row in claimed for kind in row.fakes}):
        rows = [row for row in claimed if kind in row.fakes]
        tests = sorted({test for row in rows for test in row.tests})
        with_fake, _ = run_tests(tests, f"--with-fake={kind}")
        problems += [
            f"{row.id}: {test} passes with the fake of {kind} in place of the implementation"
            for row in rows
            for test in row.tests
            if "failed" not in with_fake.get(test, ())
        ]
    return problems


def main() -> int:
    """Print what is unproven, or how much is proven; return 1 if anything is not."""
    features = read_features()
    known = recorded()
    problems = unproven(features, known)
    for problem in problems:
        print(problem)
    count = {
        status: sum(row.status == status for row in features)
        for status in ("works", "in part", "planned")
    }
    source = "a run of its own" if known is None else "the run of `make test` on this tree"
    print(f"features: {count}; {len(problems)} unproven, by {source}")
    return bool(problems)


if __name__ == "__main__":
    raise SystemExit(main())
