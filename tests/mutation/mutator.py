"""Generates mutants of a module. Each mutant differs from the module in one operator.

This module depends on Python's syntax trees only. Docstrings, messages, annotations, assertions and
raised errors are not changed, because no test should depend on them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass

NEGATED = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
MOVED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
"""Maps comparisons to comparisons that move the boundary by one."""
SWAPPED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult}

Change = Callable[[ast.AST], ast.AST]
"""Mutates a node of a copied syntax tree; returns this node or a new one."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One mutant. before, after: the changed statement at `line`. tree: the whole module."""

    line: int
    before: str
    after: str
    tree: ast.Module

    def __str__(self) -> str:
        """Return the mutant as one line."""
        return f"{self.line}: {self.before}  →  {self.after}"


def make_mutants(source: str, *, skipped_functions: frozenset[str] = frozenset()) -> list[Mutant]:
    """Return all mutants of a module, in the order of the source text.

    skipped_functions: names of functions that are not mutated.
    """
    tree = ast.parse(source)
    sites = list(_sites(tree, skipped_functions))
    return [_mutant(tree, path, change) for path, node in sites for change in _changes(node)]


Path = tuple[tuple[str, int], ...]
"""Path from the root to a node: (field, index) of each step; index -1 for a field that is not a
list."""


def _sites(
    node: ast.AST, skipped: frozenset[str], path: Path = ()
) -> Iterator[tuple[Path, ast.AST]]:
    if isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)):
        return
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in skipped:
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return  # `zip(…, strict=True)` is an assertion
    yield path, node
    for step, child in _children(node):
        yield from _sites(child, skipped, (*path, step))


def _children(node: ast.AST) -> Iterator[tuple[tuple[str, int], ast.AST]]:
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases"):
            continue
        if isinstance(value, ast.AST):
            yield (field, -1), value
            continue
        listed = enumerate(value if isinstance(value, list) else ())
        nodes = ((index, child) for index, child in listed if isinstance(child, ast.AST))
        yield from (((field, index), child) for index, child in nodes if not _is_text(child))


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _changes(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        yield from _other_comparisons(node)
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in SWAPPED:
        yield _with_attribute("op", SWAPPED[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield _with_attribute("op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield lambda copy: copy.operand
    elif isinstance(node, ast.Constant):
        yield from _other_constants(node.value)
    elif isinstance(node, ast.Return) and not _is_nothing(node.value):
        yield _with_attribute("value", ast.Constant(None))
    if isinstance(node, (ast.If, ast.While, ast.IfExp)) and _is_bare(node.test):
        yield _negated_test
    if _is_removable(node):
        yield lambda copy: ast.copy_location(ast.Pass(), copy)


def _is_nothing(value: ast.expr | None) -> bool:
    """Return whether a returned value is None or another false constant."""
    return value is None or (isinstance(value, ast.Constant) and not value.value)


def _other_comparisons(node: ast.Compare) -> Iterator[Change]:
    for index, operator in enumerate(node.ops):
        others = (table.get(type(operator)) for table in (NEGATED, MOVED))
        yield from (_with_operator(index, other) for other in others if other is not None)


def _other_constants(value: object) -> Iterator[Change]:
    if isinstance(value, bool):
        yield _with_attribute("value", not value)
    elif isinstance(value, int):
        yield _with_attribute("value", value + 1)
        yield _with_attribute("value", value - 1)
    elif isinstance(value, float):
        yield _with_attribute("value", value + 1.0)


def _is_bare(test: ast.expr) -> bool:
    """Return whether a condition has no operator that another mutation negates."""
    return isinstance(test, (ast.Name, ast.Attribute, ast.Call, ast.NamedExpr))


def _is_removable(node: ast.AST) -> bool:
    """Return whether a statement can be removed: it does more than assign a value to a name."""
    if isinstance(node, ast.Assign):
        return not any(isinstance(target, ast.Name) for target in node.targets)
    return isinstance(node, (ast.Expr, ast.AugAssign, ast.Delete, ast.Continue, ast.Break))


def _with_operator(index: int, operator: type[ast.cmpop]) -> Change:
    def change(copy: ast.AST) -> ast.AST:
        copy.ops[index] = operator()
        return copy

    return change


def _with_attribute(name: str, value: object) -> Change:
    def change(copy: ast.AST) -> ast.AST:
        setattr(copy, name, value)
        return copy

    return change


def _negated_test(copy: ast.AST) -> ast.AST:
    copy.test = ast.UnaryOp(ast.Not(), copy.test)
    return copy


def _mutant(tree: ast.Module, path: Path, change: Change) -> Mutant:
    before = _statement(tree, path)
    copy = deepcopy(tree)
    if path:
        parent = _node(copy, path[:-1])
        field, index = path[-1]
        changed = change(_node(copy, path))
        if index < 0:
            setattr(parent, field, changed)
        else:
            getattr(parent, field)[index] = changed
    ast.fix_missing_locations(copy)
    after = _statement(copy, path)
    return Mutant(line=before.lineno, before=_shown(before), after=_shown(after), tree=copy)


def _node(tree: ast.AST, path: Path) -> ast.AST:
    for field, index in path:
        tree = getattr(tree, field) if index < 0 else getattr(tree, field)[index]
    return tree


def _statement(tree: ast.AST, path: Path) -> ast.stmt:
    """Return the innermost statement around a node."""
    actual = tree
    for end in range(len(path) + 1):
        node = _node(tree, path[:end])
        actual = node if isinstance(node, ast.stmt) else actual
    return actual


def _shown(statement: ast.stmt) -> str:
    """Return the first line of a statement, without the body of a compound statement."""
    return ast.unparse(statement).splitlines()[0]
