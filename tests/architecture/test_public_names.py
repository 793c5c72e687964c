"""The names in `__all__` exist and are sorted."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

from architecture.sources import module_name, relative, shipped_files, tree_of


def public_names(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def sort_key(name: str) -> tuple[int, list[tuple[int, int | str]]]:
    """Return a sort key in the order of ruff's RUF022: constants, classes, other names."""
    group = 0 if len(name) > 1 and name.isupper() else 1 if name[:1].isupper() else 2
    pieces = [piece for piece in re.split(r"(\d+)", name) if piece]
    return group, [(0, int(p)) if p.isdecimal() else (1, p) for p in pieces]


@cache
def offers() -> dict[Path, list[str]]:
    """Return the names in `__all__` of each shipped file that has them."""
    return {path: names for path in shipped_files() if (names := public_names(tree_of(path)))}


def test_public_names_are_sorted_and_unique():
    invalid = [
        relative(path)
        for path, names in offers().items()
        if names != sorted(set(names), key=sort_key)
    ]
    assert not invalid, f"sort __all__ (`ruff check --fix --select RUF022` does it): {invalid}"


def test_public_names_can_be_imported():
    missing = []
    for path, names in offers().items():
        module = importlib.import_module(module_name(path))
        missing += [f"{module.__name__}.{name}" for name in names if not hasattr(module, name)]
    assert not missing, f"listed in __all__ but not defined: {missing}"


def test_the_core_exports_its_main_classes():
    (names,) = [n for path, n in offers().items() if module_name(path) == "dovetail"] or [[]]
    assert {"LLM", "SamplingParams"} <= set(names), "dovetail/__init__.py must export these names"
