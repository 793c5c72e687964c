"""What every test run shares: it skips what the machine cannot do, and names what it left out."""

from __future__ import annotations

import os
from collections import Counter

import pytest

NUM_NAMES_SHOWN = 30
_deselected: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a contract's fake stand in for all implementations: what then passes shows nothing."""
    parser.addoption("--with-fake", metavar="KIND", help="load the fake of this contract instead")


def pytest_configure(config: pytest.Config) -> None:
    """Put the fake in place, in this process."""
    kind = config.getoption("--with-fake")
    if kind is None:
        return
    from dovetail.plugins import PluginRegistry  # only where it is to be patched
    from dovetail.testing import load_fake

    load = PluginRegistry.load

    def load_or_fake(self: PluginRegistry, asked: str, reference: str | type) -> type:
        return load_fake(kind) if asked == kind else load(self, asked, reference)

    PluginRegistry.load = load_or_fake  # type: ignore[method-assign]  # that is the point


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests for accelerators where there is none."""
    asking = [item for item in items if item.get_closest_marker("gpu")]
    if asking and not _has_accelerator():
        for item in asking:
            item.add_marker(pytest.mark.skip(reason="no accelerator on this machine"))


def _has_accelerator() -> bool:
    return os.path.exists("/dev/nvidia0") or os.path.isdir("/dev/dri/by-path")


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Remember what this run leaves out."""
    _deselected.extend(item.nodeid for item in items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say by name what was not run, so that a green run claims no more than it did."""
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
