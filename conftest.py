"""Options and hooks of every test run. Tests that the machine cannot run are skipped and listed.

With pytest-xdist, the controller collects the deselected tests and the notes of all processes.
"""

from __future__ import annotations

import gc
import os
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest

NUM_NAMES_SHOWN = 30
CLOCK_PARTS = ("without", "only")
NEVER_SAMPLED = ("soak", "gpu")
COSTLY_SHARE = 8
"""`make test` runs one in this number of the tests and files with the mark `costly`.

`costly(n)`, for tests of a minute or more: a commit selects each of them with probability 1 / n.
"""
NOT_SELECTED = "the commit does not select this costly test"
_deselected: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add this project's pytest options."""
    # A test that also passes with the fake of a contract does not test the implementations.
    parser.addoption(
        "--with-fake",
        metavar="KIND",
        help="load the fake of this contract instead of any implementation",
    )
    parser.addoption(
        "--clock",
        choices=CLOCK_PARTS,
        help="run without the tests that measure time, or only those tests",
    )
    parser.addoption(
        "--some-costly",
        action="store_true",
        help=f"skip the tests with the mark `costly`, except one in {COSTLY_SHARE}",
    )
    parser.addoption(
        "--one-in",
        type=int,
        default=1,
        metavar="N",
        help="run one in N tests of each file, selected by the commit, and at least one",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Load the requested fake instead of any plugin of its kind, in this process."""
    kind = config.getoption("--with-fake")
    if kind is None:
        return
    from dovetail.plugins import PluginRegistry  # imported here, because only this option needs it
    from dovetail_devkit import load_fake

    load = PluginRegistry.load

    def load_or_fake(self: PluginRegistry, requested: str, reference: str | type) -> type:
        return load_fake(kind) if requested == kind else load(self, requested, reference)

    PluginRegistry.load = load_or_fake  # type: ignore[method-assign]


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Return a function that adds a note to the end of the report: `note("3.1 ms")`."""
    return partial(record_property, "note")


@pytest.hookimpl(tryfirst=True)  # before slow cases are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the requested part of the tests. Skip tests that need a missing accelerator."""
    _sample(items)
    if config.getoption("--some-costly"):
        _skip_costly(items)
    _keep_share(items, config.getoption("--one-in"))
    part = config.getoption("--clock")
    if part is not None:
        # Not reported as deselected: another run executes these tests.
        items[:] = [x for x in items if bool(x.get_closest_marker("clock")) == (part == "only")]
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and not _has_accelerator():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="no accelerator on this machine"))


def pytest_collection_finish() -> None:
    """Exclude the collected tests and modules from later garbage collections.

    Tests that call `gc.collect` need 0.01 s instead of 1 s.
    """
    gc.collect()
    gc.freeze()


def _sample(items: list[pytest.Item]) -> None:
    """Keep one in `n` cases of a test with the mark `sampled(n)`. `make soak` runs all of them.

    A hash of the commit selects the cases, so every case is selected at some commit, and a failing
    case cannot be avoided by choice. The slow cases of a test are sampled separately: `make test`
    runs at least one of the others, and `make wheels` at least one of the slow cases.
    """
    cases: defaultdict[tuple[str, int, bool], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if any(item.get_closest_marker(name) for name in NEVER_SAMPLED):
            continue
        if (mark := item.get_closest_marker("sampled")) is not None:
            is_slow = item.get_closest_marker("slow") is not None
            cases[item.nodeid.partition("[")[0], mark.args[0], is_slow].append(item)
    commit = _commit() if cases else b""
    for (_, share, _), actual in cases.items():
        actual.sort(key=lambda item: sha256(commit + item.nodeid.encode()).digest())
        for item in actual[-(-len(actual) // share) :]:
            item.add_marker("soak")


def _keep_share(items: list[pytest.Item], share: int) -> None:
    """Keep one in `share` tests of each file, in their order."""
    if share <= 1:
        return
    files: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.nodeid.partition("::")[0]].append(item)
    commit = _commit()
    kept: set[pytest.Item] = set()
    for tests in files.values():
        tests.sort(key=lambda item: sha256(commit + item.nodeid.encode()).digest())
        kept.update(tests[: -(-len(tests) // share)])
    items[:] = [item for item in items if item in kept]


def _skip_costly(items: list[pytest.Item]) -> None:
    """Skip all cases of the costly tests that a hash of the commit does not select.

    The tests of a file are selected together if the file has the mark, because they share costly
    fixtures.
    """
    costly: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    shares: dict[str, int] = {}
    for item in items:
        if (mark := item.get_closest_marker("costly")) is not None:
            name = _unit_of(item)
            costly[name].append(item)
            if mark.args:
                shares[name] = mark.args[0]
    commit = _commit() if costly else b""
    order = {name: sha256(commit + name.encode()).digest() for name in costly}
    names = sorted(costly.keys() - shares.keys(), key=order.__getitem__)
    skipped = names[-(-len(names) // COSTLY_SHARE) :]
    skipped += [name for name, n in shares.items() if int.from_bytes(order[name]) % n]
    for name in skipped:
        for item in costly[name]:
            item.add_marker(pytest.mark.skip(reason=NOT_SELECTED))


def _unit_of(item: pytest.Item) -> str:
    """Return the name of what a hash of the commit selects: the file of a test, or the test."""
    file = item.getparent(pytest.Module)
    if file is not None and any(mark.name == "costly" for mark in file.own_markers):
        return file.nodeid
    return item.nodeid.partition("[")[0]


def _commit() -> bytes:
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, check=False)
    except OSError:
        return b""
    return done.stdout


def _has_accelerator() -> bool:
    return os.path.exists("/dev/nvidia0") or os.path.isdir("/dev/dri/by-path")


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Record the tests that this run deselects."""
    _deselected.extend(item.nodeid for item in items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the names of deselected tests to the xdist controller."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["deselected"] = _deselected


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Receive the names of deselected tests from an xdist worker.

    Every worker deselects the same tests.
    """
    _deselected[:] = getattr(node, "workeroutput", {}).get("deselected", _deselected)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the notes of tests (fixture `note`) and the names of the tests that did not run."""
    notes = list(_notes(terminalreporter))
    if notes:
        terminalreporter.section("notes")
    for line in notes:
        terminalreporter.write_line(line)
    # The cases of one test share one line, so that parametrized tests do not fill the list.
    functions = Counter(name.split("[", maxsplit=1)[0] for name in _deselected)
    skips: Counter[str] = Counter()
    not_selected: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        if NOT_SELECTED in reason:
            not_selected[report.nodeid.partition("[")[0]] += 1
        else:
            skips[f"skipped: {report.nodeid} ({reason})"] += 1
    left_out = list(skips)  # first, because `make soak` shows them
    if not_selected:
        left_out.append(
            f"not selected at this commit: {len(not_selected)} costly tests "
            f"({not_selected.total()} cases)"
        )
    left_out += [
        f"deselected: {name}" + (f" ({count} cases)" if count > 1 else "")
        for name, count in functions.items()
    ]
    if not left_out:
        terminalreporter.write_line("deselected or skipped: nothing")
        return
    terminalreporter.section(f"{len(_deselected)} deselected, {skips.total()} skipped")
    for line in left_out[:NUM_NAMES_SHOWN]:
        terminalreporter.write_line(line)
    if len(left_out) > NUM_NAMES_SHOWN:
        terminalreporter.write_line(f"… and {len(left_out) - NUM_NAMES_SHOWN} more")
    if _deselected or not_selected:
        terminalreporter.write_line(
            "`make soak` runs the tests that are deselected or not selected."
        )


def _notes(terminalreporter: pytest.TerminalReporter) -> Iterator[str]:
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            if report.when == "call":
                yield from (text for name, text in report.user_properties if name == "note")
