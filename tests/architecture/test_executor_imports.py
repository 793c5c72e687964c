"""The executors import only the modules that the page for executor authors lists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core/src/dovetail/executors"
PAGE = ROOT / "docs/plugins/executor.md"


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


def test_executors_import_only_the_modules_that_their_page_lists():
    section = PAGE.read_text("utf-8").partition("## Modules for executors")[2].partition("\n## ")[0]
    listed = re.findall(r"`(dovetail\.[a-z_.]+)`", section)
    assert "dovetail.processes" in listed
    files = [CORE / "uniproc.py", *sorted((CORE / "multiproc").glob("*.py"))]
    used = {module for file in files for module in imported_modules(file)}
    own = {module for module in used if module.partition(".")[0] == "dovetail"}
    allowed = (*listed, "dovetail.executors.multiproc")
    unlisted = {
        our for our in own if not any(our == name or our.startswith(f"{name}.") for name in allowed)
    }
    advice = f"add these modules to {PAGE.name}, or do not import them"
    assert not unlisted, f"{advice}: {sorted(unlisted)}"
    assert "dovetail.processes.child_group" in own
