"""Holds docs/features.md to its word: `python tests/features/prove.py`, a step of CI.

Every linked test of a row that claims something is run: it has to pass, and not by being skipped.
Then the tests of each row that names a kind are run again with that contract's fake in the place of
every implementation (`pytest --with-fake KIND`): there, each of them has to fail, for a test that
cannot tell an implementation from a fake shows nothing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from table import ROOT, Feature, read_features


def outcomes(tests: list[str], *options: str) -> dict[str, set[str]]:
    """Run `tests` and return, for each, the outcomes of its cases: passed, failed, skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-o", "junit_family=xunit1"]
        command += [f"--junitxml={report}", *options]
        subprocess.run([*command, *tests], cwd=ROOT, check=False, capture_output=True)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    return {test: {_outcome(case) for case in cases if _is_of(case, test)} for test in tests}


def _is_of(case: ElementTree.Element, test: str) -> bool:
    path, _, name = test.partition("::")
    module = case.attrib["classname"].replace(".", "/")
    function = case.attrib["name"].split("[", maxsplit=1)[0]
    return function == name and module.endswith(path.removesuffix(".py"))


def _outcome(case: ElementTree.Element) -> str:
    tags = {child.tag for child in case}
    if "skipped" in tags:
        return "skipped"
    return "failed" if tags & {"failure", "error"} else "passed"


def unproven(features: list[Feature]) -> list[str]:
    """Return what is wrong with the claims, each a sentence."""
    claimed = [feature for feature in features if feature.status != "planned"]
    problems = [
        f"{row.id}: {row.status}, but no test is linked" for row in claimed if not row.tests
    ]
    found = outcomes(sorted({test for row in claimed for test in row.tests}))
    for row in claimed:
        for test in row.tests:
            if found[test] != {"passed"}:
                seen = ", ".join(sorted(found[test])) or "not found"
                problems.append(f"{row.id}: {test}: {seen}")
    for kind in sorted({kind for row in claimed for kind in row.fakes}):
        rows = [row for row in claimed if kind in row.fakes]
        with_fake = outcomes(
            sorted({test for row in rows for test in row.tests}), "--with-fake", kind
        )
        problems += [
            f"{row.id}: {test} passes with the fake of {kind} in place of the implementation"
            for row in rows
            for test in row.tests
            if "failed" not in with_fake[test]
        ]
    return problems


def main() -> int:
    """Print what is unproven, or how much is proven; return 1 if anything is not."""
    features = read_features()
    problems = unproven(features)
    for problem in problems:
        print(problem)
    count = {
        status: sum(row.status == status for row in features)
        for status in ("works", "in part", "planned")
    }
    print(f"features: {count}; {len(problems)} unproven")
    return bool(problems)


if __name__ == "__main__":
    raise SystemExit(main())
