"""What a module says it offers is there, and in order."""

import ast
import importlib
import re

from architecture.sources import module_name, relative, shipped_files, tree_of


def offered_names(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def sort_key(name: str) -> tuple[int, list[tuple[int, int | str]]]:
    """Constants, then classes, then the rest, numbers by value: as ruff's RUF022 sorts."""
    group = 0 if len(name) > 1 and name.isupper() else 1 if name[:1].isupper() else 2
    pieces = [piece for piece in re.split(r"(\d+)", name) if piece]
    return group, [(0, int(p)) if p.isdecimal() else (1, p) for p in pieces]


OFFERS = {path: names for path in shipped_files() if (names := offered_names(tree_of(path)))}


def test_offered_names_are_sorted_and_unique():
    wrong = [
        relative(path)
        for path, names in OFFERS.items()
        if names != sorted(set(names), key=sort_key)
    ]
    assert not wrong, f"sort __all__ (`ruff check --fix --select RUF022` does it): {wrong}"


def test_offered_names_can_be_imported():
    missing = []
    for path, names in OFFERS.items():
        module = importlib.import_module(module_name(path))
        missing += [f"{module.__name__}.{name}" for name in names if not hasattr(module, name)]
    assert not missing, f"named in __all__ but not there: {missing}"


def test_the_core_offers_its_first_names():
    (names,) = [n for path, n in OFFERS.items() if module_name(path) == "dovetail"] or [[]]
    assert {"LLM", "SamplingParams"} <= set(names), "dovetail/__init__.py must offer these"
