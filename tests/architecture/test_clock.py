"""Only one module of the core reads the time, so that a scheduler can run in a simulator."""

import ast

import pytest

from architecture.sources import ROOT, dotted_name, imported_names, relative, shipped_files, tree_of

CORE = ROOT / "core/src/dovetail"
THE_CLOCK = "core/src/dovetail/clock.py"
WALL_CLOCKS = frozenset({"datetime.now", "datetime.utcnow", "datetime.today", "date.today"})

# Maps a file to the reason why it reads the time directly. A stale entry fails the test.
EXCEPTIONS = {
    "core/src/dovetail/tokenizers/template_renderer.py": "templates print the calendar's date",
}


def clock_reads(tree: ast.Module) -> list[int]:
    """Return the lines that import `time` or read the current date."""
    lines = [line for name, line in imported_names(tree) if name == "time"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            named = ".".join(dotted_name(node).split(".")[-2:])
            lines += [node.lineno] if named in WALL_CLOCKS else []
    return lines


def readers() -> dict[str, list[int]]:
    files = [path for path in shipped_files() if CORE in path.parents]
    by_name = {relative(path): clock_reads(tree_of(path)) for path in files}
    return {name: lines for name, lines in by_name.items() if lines}


@pytest.mark.costly
def test_only_the_clock_module_reads_the_time():
    by_name = {k: v for k, v in readers().items() if k != THE_CLOCK and k not in EXCEPTIONS}
    assert not by_name, f"take a dovetail.clock.Clock instead (file: lines): {by_name}"


def test_the_clock_module_itself_reads_the_time():
    assert THE_CLOCK in readers()


def test_each_listed_exception_is_still_needed():
    stale = sorted(set(EXCEPTIONS) - set(readers()))
    assert not stale, f"delete from EXCEPTIONS in {__file__}: {stale}"


def test_the_check_finds_each_way_to_read_the_time():
    for source in (
        "import time",
        "def f():\n    from time import perf_counter",
        "import datetime\ndatetime.datetime.now()",
        "date.today()",
        "def f(now=datetime.now): pass",
    ):
        assert clock_reads(ast.parse(source)), source
    assert not clock_reads(ast.parse("self.clock.now_ns()"))
