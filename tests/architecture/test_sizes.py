"""Size limits of files, functions and packages, so that one person can read them."""

import ast
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from architecture.sources import (
    ROOT,
    files_below,
    members,
    relative,
    shipped_files,
    tree_of,
    written_files,
)

MAX_COLUMNS = 100
MAX_FILE_LINES = {".py": 400, ".cpp": 600, ".h": 600, ".hpp": 600}
MAX_FUNCTION_LINES = 60
MAX_NESTING = 3
MAX_PARAMETERS = 7
MAX_PACKAGE_FILES = 20
ONE_FILE_PER_KIND = ("interfaces", "suites", "fakes", "families")
"""Packages with one file for each plugin kind, or for each model family; they grow with these."""


# Maps "rule path[::function]" to the reason. An entry that is not needed fails the test.
EXCEPTIONS: dict[str, str] = {
    "parameters plugins/devkit/src/dovetail_devkit/attention/reference.py::reference_attention": (
        "keywords for the features of an attention layer, with the names of AttentionLayerContext"
    ),
    "parameters core/src/dovetail/entrypoints/llm.py::LLM.chat": (
        "keywords with the names that users know from other engines and from OpenAI's API"
    ),
}

BLOCKS = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.With,
    ast.AsyncWith,
    ast.Try,
    ast.TryStar,
    ast.Match,
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Return the nesting depth of a statement. An `elif` has the depth of its `if`. A `def` starts
    at zero."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*FUNCTIONS, ast.ClassDef, ast.expr)):
            continue
        chained = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
        # `else: if` and `elif` have the same syntax tree; the column distinguishes them.
        chained = chained and child.col_offset == node.col_offset
        inside = depth + (isinstance(child, BLOCKS) and not chained)
        deepest = max(deepest, nesting(child, inside))
    return deepest


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, in_class: bool) -> int:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    bound = in_class and names[:1] in (["self"], ["cls"])
    return len(names) - bound


def is_triton_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def function_breaches(
    function: ast.FunctionDef | ast.AsyncFunctionDef, in_class: bool
) -> dict[str, str]:
    num_lines = (function.end_lineno or function.lineno) - function.lineno + 1
    kernel = is_triton_kernel(function)
    depth, width = nesting(function), num_parameters(function, in_class)
    by_name = {}
    if num_lines > MAX_FUNCTION_LINES and not kernel:
        by_name["lines"] = f"{num_lines} lines > {MAX_FUNCTION_LINES}: split by responsibility"
    if depth > MAX_NESTING:
        by_name["nesting"] = (
            f"nesting {depth} > {MAX_NESTING}: return early, or move the inner part to a function"
        )
    if width > MAX_PARAMETERS and not kernel:
        by_name["parameters"] = f"{width} parameters > {MAX_PARAMETERS}: bundle into a dataclass"
    return by_name


def functions_in(node: ast.AST, prefix: str = "", in_class: bool = False):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            yield prefix + child.name, child, in_class
            yield from functions_in(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from functions_in(child, f"{prefix}{child.name}.", in_class=True)
        elif not isinstance(child, ast.expr):
            yield from functions_in(child, prefix, in_class)


def file_breaches(path: Path) -> dict[str, str]:
    lines = path.read_text("utf-8").splitlines()
    maximum, where = MAX_FILE_LINES[path.suffix], relative(path)
    by_name = {}
    if len(lines) > maximum:
        by_name[f"file {where}"] = f"{len(lines)} lines > {maximum}: split by responsibility"
    wide = [number for number, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS]
    if wide:
        by_name[f"columns {where}"] = f"lines {wide[:5]} have more than {MAX_COLUMNS} columns"
    return by_name


def all_breaches() -> dict[str, str]:
    native = [p for m in members() for p in files_below(m, ".cpp", ".h", ".hpp")]
    by_name: dict[str, str] = {}
    for path in (*written_files(), *native):
        by_name |= file_breaches(path)
    for path in written_files():
        for name, function, in_class in functions_in(tree_of(path)):
            breaches = function_breaches(function, in_class)
            where = f"{relative(path)}::{name}"
            by_name |= {f"{rule} {where}": text for rule, text in breaches.items()}
    return by_name


@pytest.mark.costly
def test_files_and_functions_are_within_the_size_limits():
    breaches = [f"{k}: {v}" for k, v in all_breaches().items() if k not in EXCEPTIONS]
    assert not breaches, "\n".join(
        ["too large (or list it in EXCEPTIONS with a reason):", *breaches]
    )


@pytest.mark.costly
def test_each_listed_exception_is_still_needed():
    stale = [key for key in EXCEPTIONS if key not in all_breaches()]
    assert not stale, f"not needed any more, delete from EXCEPTIONS in {__file__}: {stale}"


def crowded_packages(paths: Iterable[Path]) -> dict[str, int]:
    """Return the packages with too many files, and the number of their files."""
    counts = Counter(path.parent for path in paths)
    return {
        relative(folder): count
        for folder, count in counts.items()
        if count > MAX_PACKAGE_FILES and folder.name not in ONE_FILE_PER_KIND
    }


def test_no_package_has_too_many_files():
    actual = crowded_packages(shipped_files())
    assert not actual, f"more than {MAX_PACKAGE_FILES} files: move some to a subpackage: {actual}"


def test_a_package_with_too_many_files_is_reported():
    folder = ROOT / "core/src/dovetail/new"
    paths = [folder / f"m{number}.py" for number in range(MAX_PACKAGE_FILES + 1)]
    assert crowded_packages(paths) == {"core/src/dovetail/new": MAX_PACKAGE_FILES + 1}
    assert crowded_packages(paths[1:]) == {}


def test_a_file_that_is_too_large_is_reported():
    assert ROOT / "core/src/dovetail/plan.py" in written_files()


def test_the_sizes_of_files_and_functions_are_measured_correctly():
    source = (
        "class C:\n"
        "    def m(self, a, b, *, c):\n"
        "        if a:\n"
        "            for x in b:\n"
        "                pass\n"
        "        elif b:\n"
        "            with c:\n"
        "                while x:\n"
        "                    if x:\n"
        "                        pass\n"
    )
    ((name, function, in_class),) = functions_in(ast.parse(source))
    assert (name, num_parameters(function, in_class), nesting(function)) == ("C.m", 3, 4)
    assert set(function_breaches(function, in_class)) == {"nesting"}
