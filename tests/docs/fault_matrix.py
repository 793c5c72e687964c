"""The fault matrix of docs/reliability.md as data: read from pytest's reports, or from the page.

Knows which tests are about faults; what they found is in the reports that `pytest --junitxml`
writes. A report of another run adds to what the page has, so that a long sweep may come in parts.
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
CASE = re.compile(r"test_no_fault_hangs_leaks_or_goes_unnamed\[([\w.]+)-(.+)\]")
NOT_RUN = "not run"


def actions() -> tuple[str, ...]:
    """Return what is done at each point, as the sweep's source says."""
    for node in ast.parse((ROOT / SWEEP).read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ACTIONS":
            return tuple(ast.literal_eval(node.value))
    raise AssertionError(f"{SWEEP} has no ACTIONS")


Matrix = dict[str, dict[str, str]]
"""Point to action to what was found: the seconds that it took, "failed", or `NOT_RUN`."""


def empty_matrix() -> Matrix:
    return {point: dict.fromkeys(actions(), NOT_RUN) for point in POINTS}


def read_reports(paths: Iterable[Path]) -> Matrix:
    """Return what the reports tell of the sweep."""
    found = empty_matrix()
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            match = CASE.fullmatch(case.attrib["name"])
            if match and match[1] in found and match[2] in found[match[1]]:
                found[match[1]][match[2]] = _outcome(case)
    return found


def _outcome(case: ElementTree.Element) -> str:
    tags = {child.tag for child in case}
    if "skipped" in tags:
        return NOT_RUN
    return "failed" if tags & {"failure", "error"} else f"{float(case.attrib['time']):.1f} s"


def read_page() -> Matrix:
    """Return the matrix that the page shows; points that are no more are left out."""
    found = empty_matrix()
    for line in recorded(PAGE.read_text("utf-8"), "faults").splitlines()[2:]:
        point, _, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        name = point.strip("`")
        if name in found:
            found[name] = dict(zip(actions(), cells, strict=True))
    return found


def merged(old: Matrix, new: Matrix) -> Matrix:
    """Return `old` with all that `new` has found."""
    return {
        point: {
            action: new[point][action] if new[point][action] != NOT_RUN else found
            for action, found in row.items()
        }
        for point, row in old.items()
    }


def render(matrix: Matrix) -> str:
    """Return the matrix as the page shows it."""
    head = ["point", "what is about to happen", *(f"`{action}`" for action in actions())]
    lines = [_line(head), _line(["---"] * len(head))]
    lines += [_line([f"`{point}`", POINTS[point], *row.values()]) for point, row in matrix.items()]
    return "\n".join(lines)


def summary(matrix: Matrix) -> str:
    """Return what the matrix comes to, in a sentence."""
    cells = [cell for row in matrix.values() for cell in row.values()]
    failed, not_run = cells.count("failed"), cells.count(NOT_RUN)
    times = [float(cell.removesuffix(" s")) for cell in cells if cell.endswith(" s")]
    longest = f"; the longest took {max(times):.1f} s" if times else ""
    return (
        f"{len(matrix)} points, {len(cells)} faults: {len(times)} passed, {failed} failed, "
        f"{not_run} not run{longest}."
    )


def record_page(matrix: Matrix) -> None:
    """Put the matrix and its summary between the page's marks."""
    text = record(PAGE.read_text("utf-8"), "faults", render(matrix))
    PAGE.write_text(record(text, "summary", summary(matrix)), "utf-8")


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
