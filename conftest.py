"""What every test run shares: it skips what the machine cannot do, and names what it left out.

A run may be spread over processes (pytest-xdist): what they left out and what tests told is
gathered in the one that reports.
"""

from __future__ import annotations

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
_deselected: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this project's runs."""
    # What passes with a contract's fake in place of all implementations shows nothing.
    parser.addoption("--with-fake", metavar="KIND", help="load the fake of this contract instead")
    parser.addoption(
        "--clock", choices=CLOCK_PARTS, help="run without the tests that measure time, or only them"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Put the fake in place, in this process."""
    kind = config.getoption("--with-fake")
    if kind is None:
        return
    from dovetail.plugins import PluginRegistry  # only where it is to be patched
    from dovetail_devkit import load_fake

    load = PluginRegistry.load

    def load_or_fake(self: PluginRegistry, asked: str, reference: str | type) -> type:
        return load_fake(kind) if asked == kind else load(self, asked, reference)

    PluginRegistry.load = load_or_fake  # type: ignore[method-assign]  # that is the point


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Say something at the end of the run, whatever is captured: `tell("3.1 ms")`."""
    return partial(record_property, "told")


@pytest.hookimpl(tryfirst=True)  # before the cases that are slow are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the asked part of the tests; skip those for accelerators where there is none."""
    _sample(items)
    part = config.getoption("--clock")
    if part is not None:
        # The other part is no test left out: another run has it.
        items[:] = [x for x in items if bool(x.get_closest_marker("clock")) == (part == "only")]
    asking = [item for item in items if item.get_closest_marker("gpu")]
    if asking and not _has_accelerator():
        for item in asking:
            item.add_marker(pytest.mark.skip(reason="no accelerator on this machine"))


def _sample(items: list[pytest.Item]) -> None:
    """Leave all but one in `n` of the cases of a test with the mark `sampled(n)` to `make soak`.

    A hash of the commit selects the cases, so every case is selected at some commit, and a failing
    case cannot be avoided by choice.
    """
    cases: defaultdict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker("sampled")) is not None:
            cases[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    commit = _commit() if cases else b""
    for (_, share), found in cases.items():
        found.sort(key=lambda item: sha256(commit + item.nodeid.encode()).digest())
        for item in found[-(-len(found) // share) :]:
            item.add_marker("soak")


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
    """Remember what this run leaves out."""
    _deselected.extend(item.nodeid for item in items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand what one of several processes left out to the one that reports."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["deselected"] = _deselected


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Take what a process left out: each of them leaves out the same."""
    _deselected[:] = getattr(node, "workeroutput", {}).get("deselected", _deselected)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests told, and by name what was not run: a green run claims no more than it did.

    A test tells with the fixture `tell`.
    """
    told = list(_told(terminalreporter))
    if told:
        terminalreporter.section("told")
    for line in told:
        terminalreporter.write_line(line)
    # Cases of one test count as one line: a product of parameters would hide all others.
    functions = Counter(name.split("[", maxsplit=1)[0] for name in _deselected)
    left_out = [
        f"deselected: {name}" + (f" ({count} cases)" if count > 1 else "")
        for name, count in functions.items()
    ]
    skips: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        skips[f"skipped: {report.nodeid} ({reason})"] += 1
    left_out += skips
    if not left_out:
        terminalreporter.write_line("left out: nothing")
        return
    terminalreporter.section(f"left out: {len(_deselected)} deselected, {skips.total()} skipped")
    for line in left_out[:NUM_NAMES_SHOWN]:
        terminalreporter.write_line(line)
    if len(left_out) > NUM_NAMES_SHOWN:
        terminalreporter.write_line(f"… and {len(left_out) - NUM_NAMES_SHOWN} more")
    if _deselected:
        terminalreporter.write_line("`make soak` runs all of them.")


def _told(terminalreporter: pytest.TerminalReporter) -> Iterator[str]:
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            if report.when == "call":
                yield from (text for name, text in report.user_properties if name == "told")
