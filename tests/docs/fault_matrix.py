"""The fault matrix of docs/reliability.md, read from pytest reports or from the page.

The results are in the reports that `pytest --junitxml` writes. A report updates the matrix of the
page, so a long sweep can be run in parts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from docs.policy_facts import record, recorded

from dovetail.faults import POINTS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
SWEEP = "core/tests/engine_process/test_injected_faults.py"
CASE = re.compile(r"test_every_fault_is_reported_without_hangs_or_leaks\[([\w.]+)-(.+)\]")
NOT_RUN = "not run"


def actions() -> tuple[str, ...]:
    """Return the actions that the sweep injects at each fault point, read from its source."""
    for node in ast.parse((ROOT / SWEEP).read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ACTIONS":
            return tuple(ast.literal_eval(node.value))
    raise AssertionError(f"{SWEEP} has no ACTIONS")


Matrix = dict[str, dict[str, str]]
"""Maps fault point and action to the result: the seconds of the test, "failed", or `NOT_RUN`."""


def empty_matrix() -> Matrix:
    return {point: dict.fromkeys(actions(), NOT_RUN) for point in POINTS}


def read_reports(paths: Iterable[Path]) -> Matrix:
    """Return the results of the sweep that the reports contain."""
    actual = empty_matrix()
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            match = CASE.fullmatch(case.attrib["name"])
            if match and match[1] in actual and match[2] in actual[match[1]]:
                actual[match[1]][match[2]] = _outcome(case)
    return actual


def _outcome(case: ElementTree.Element) -> str:
    tags = {child.tag for child in case}
    if "skipped" in tags:
        return NOT_RUN
    return "failed" if tags & {"failure", "error"} else f"{float(case.attrib['time']):.1f} s"


def read_page() -> Matrix:
    """Return the matrix that the page shows, without fault points that no longer exist."""
    actual = empty_matrix()
    for line in recorded(PAGE.read_text("utf-8"), "faults").splitlines()[2:]:
        point, _, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        name = point.strip("`")
        if name in actual:
            actual[name] = dict(zip(actions(), cells, strict=True))
    return actual


def merged(old: Matrix, new: Matrix) -> Matrix:
    """Return `old`, updated with the results of `new`."""
    return {
        point: {
            action: new[point][action] if new[point][action] != NOT_RUN else actual
            for action, actual in row.items()
        }
        for point, row in old.items()
    }


def render(matrix: Matrix) -> str:
    """Return the matrix as a Markdown table."""
    head = ["point", "next operation", *(f"`{action}`" for action in actions())]
    lines = [_line(head), _line(["---"] * len(head))]
    lines += [_line([f"`{point}`", POINTS[point], *row.values()]) for point, row in matrix.items()]
    return "\n".join(lines)


def summary(matrix: Matrix) -> str:
    """Return a summary of the matrix in one sentence."""
    cells = [cell for row in matrix.values() for cell in row.values()]
    failed, not_run = cells.count("failed"), cells.count(NOT_RUN)
    times = [float(cell.removesuffix(" s")) for cell in cells if cell.endswith(" s")]
    longest = f"; the longest took {max(times):.1f} s" if times else ""
    return (
        f"{len(matrix)} points, {len(cells)} faults: {len(times)} passed, {failed} failed, "
        f"{not_run} not run{longest}."
    )


def record_page(matrix: Matrix) -> None:
    """Write the matrix and its summary between two marks of the page."""
    text = record(PAGE.read_text("utf-8"), "faults", render(matrix))
    PAGE.write_text(record(text, "summary", summary(matrix)), "utf-8")


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
