"""Runs the tests as `make test` does, and records the outcomes for this state of the files.

Tests that measure time (marker `clock`) run alone, after all other tests, which run in parallel.
`python tests/features/suite.py` runs all tests, but of the tests with the mark `costly` only those
that the commit selects, and writes a record that is valid until a file
changes. It takes no options and ignores pytest options of the environment, so that a partial run is
never recorded as a complete run.

The tests that fail are repeated once, while no other tests run, if they are in at most
MAX_REPEATED_FILES files. A test that passes then counts as passed and is printed as unstable. The
reason is that on two shared cores, one of 10,000 tests sometimes exceeds a time limit that it never
exceeds alone. The limit counts files because the tests of a file may share a server, which the
first failure leaves busy for the others. `make soak` and the runs of `make features` repeat
nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / ".pytest_cache" / "suite.json"
PARALLEL = ("-n", "4", "--dist", "loadfile")
"""pytest runs four processes on two cores, because many tests wait for processes that they
start."""
PARTS = {"--clock=without": PARALLEL, "--clock=only": ()}
"""Maps the option that selects a part of the tests to the options with which it runs."""
CLOCK_MARK = "mark.clock"
SOME_COSTLY = "--some-costly"
NOT_SELECTED = "not selected"
"""Outcome of a costly test that the commit does not select."""
FAILED = 1
NO_TESTS = 5
MAX_REPEATED_FILES = 3
NUM_FILES_SHOWN = 25
FINISHED_CODES = (0, 1, NO_TESTS)
"""Exit codes of pytest: all passed, some failed, no tests."""

Outcomes = dict[str, set[str]]
"""Maps a test ("path::name") to the outcomes of its cases: passed, failed, skipped or
NOT_SELECTED."""


def run_tests(
    tests: Sequence[str] = (), *options: str, shown: bool = False, repeats: bool = False
) -> tuple[Outcomes, int]:
    """Run `tests`, or all tests. Return the outcomes and the worst exit code.

    shown: whether to print pytest's output. repeats: whether the tests that fail are repeated; not
    for runs in which they must fail. An aborted part of the run has no outcomes.
    """
    outcomes: Outcomes = {}
    codes = []
    for part, parallel in PARTS.items():
        chosen = list(tests) if parallel else _clock_part(tests)
        if not (parallel or chosen):
            continue
        actual, code = _run(part, *parallel, *options, *chosen, shown=shown, repeats=repeats)
        codes.append(code)
        for test, seen in actual.items():
            outcomes.setdefault(test, set()).update(seen)
    return outcomes, max(codes, key=abs)


def _clock_part(tests: Sequence[str]) -> list[str]:
    """Return those of `tests`, or of all files, whose files use the mark `clock`."""
    files = files_with_clock_tests()
    return [test for test in tests if test.partition("::")[0] in files] if tests else files


def files_with_clock_tests() -> list[str]:
    """Return the test files that use the mark `clock`, so that no other file is imported."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    folders = settings["tool"]["pytest"]["ini_options"]["testpaths"]
    files = {file for folder in folders for file in ROOT.glob(f"{folder}/**/test_*.py")}
    return sorted(
        str(file.relative_to(ROOT)) for file in files if CLOCK_MARK in file.read_text("utf-8")
    )


def _run(part: str, *arguments: str, shown: bool, repeats: bool) -> tuple[Outcomes, int]:
    with tempfile.TemporaryDirectory() as folder:
        report, cache = Path(folder) / "report.xml", Path(folder) / "cache"
        base = [sys.executable, "-m", "pytest", "-q", part, "-o", f"cache_dir={cache}"]
        code = _pytest([*base, f"--junitxml={report}", *arguments], shown)
        if code not in FINISHED_CODES:
            return {}, code
        if shown:
            print(slowest_files(report), flush=True)
        outcomes = _outcomes_in(report)
        if repeats and code == FAILED and len(_files_of(_failed_in(cache))) <= MAX_REPEATED_FILES:
            code = _repeat(base, outcomes, cache, shown)
        return outcomes, code % NO_TESTS


def _pytest(command: list[str], shown: bool) -> int:
    # Tests that run in parallel compute with one thread unless they set another number.
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=not shown, check=False)
    return done.returncode


def _failed_in(cache: Path) -> list[str]:
    """Return the test cases that failed in the last run with this cache of pytest."""
    return sorted(json.loads((cache / "v" / "cache" / "lastfailed").read_text("utf-8")))


def _files_of(cases: Sequence[str]) -> set[str]:
    return {case.split("::", maxsplit=1)[0] for case in cases}


def _repeat(base: list[str], outcomes: Outcomes, cache: Path, shown: bool) -> int:
    """Repeat the test cases that failed. Correct `outcomes` and return 0 if all of them pass."""
    failed = _failed_in(cache)
    if code := _pytest([*base, "--last-failed", *failed], shown):
        return code
    for case in failed:
        outcomes[case.split("[", maxsplit=1)[0]] -= {"failed"}
        outcomes[case.split("[", maxsplit=1)[0]] |= {"passed"}
    print("unstable tests, which failed once and passed alone:", *failed, sep="\n  ", flush=True)
    return 0


def slowest_files(report: Path) -> str:
    """Return the slowest test files with their seconds, one line each."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        seconds[case.attrib["classname"]] += float(case.attrib["time"])
    rows = [f"{took:7.1f} s  {name}" for name, took in seconds.most_common(NUM_FILES_SHOWN)]
    return "\n".join([f"test files by time, {seconds.total():.0f} s in total:", *rows])


def _outcomes_in(report: Path) -> Outcomes:
    outcomes: Outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        path = case.attrib["classname"].replace(".", "/")
        name = case.attrib["name"].split("[", maxsplit=1)[0]
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "passed"
        if (skip := case.find("skipped")) is not None:
            is_costly = "costly" in skip.attrib.get("message", "")
            outcome = NOT_SELECTED if is_costly else "skipped"
        outcomes.setdefault(f"{path}.py::{name}", set()).add(outcome)
    return outcomes


def tree_state() -> str:
    """Return a digest of the commit, all files that git does not ignore, and installed packages.

    Returns "" without git.
    """
    try:
        head = _git("rev-parse", "HEAD")
        names = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split(b"\0")
    except (OSError, subprocess.CalledProcessError):
        return ""
    state = hashlib.sha256(head)
    for name in sorted(set(filter(None, names))):
        path = ROOT / os.fsdecode(name)
        content = hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b"none"
        state.update(name + b"\0" + content)
    installed = sorted(
        f"{distribution.name} {distribution.version}" for distribution in distributions()
    )
    state.update("\n".join([sys.version, *installed]).encode())
    return state.hexdigest()


def commit() -> bytes:
    """Return the id of the commit that is checked out, or b"" without git."""
    try:
        return _git("rev-parse", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return b""


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True)
    return done.stdout


def recorded() -> Outcomes | None:
    """Return the outcomes of the suite for this state of the files, or None if it has not run."""
    if not RECORD.is_file():
        return None
    record = json.loads(RECORD.read_text("utf-8"))
    if not record["state"] or record["state"] != tree_state():
        return None
    return {test: set(actual) for test, actual in record["outcomes"].items()}


def main() -> int:
    """Run all tests, record the outcomes, and return the exit code."""
    RECORD.unlink(missing_ok=True)
    state = tree_state()
    outcomes, code = run_tests((), SOME_COSTLY, shown=True, repeats=True)
    # If a file changed during the run, the run did not test one state of the files.
    if state != tree_state():
        print("no record: files of the checkout were changed or created during the run", flush=True)
    elif code in FINISHED_CODES:
        RECORD.parent.mkdir(exist_ok=True)
        content = {"state": state, "outcomes": {test: sorted(outcomes[test]) for test in outcomes}}
        RECORD.write_text(json.dumps(content), "utf-8")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
