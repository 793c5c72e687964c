"""Writes the lists in docs/environment.md: run this file to update the page.

The environment variables are the constants "DOVETAIL_…" of the shipped code, with the text below
each constant. The logging options are those of `dovetail serve`.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from dovetail_server.serve_command import HELP

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "environment.md"
LOGGING = ("log_level", "log_format", "log_requests", "trace_functions", "verbose")

_NAME = re.compile(r"DOVETAIL_[A-Z_]+")
_BLOCK = re.compile(r"(<!-- recorded: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_FOLDERS = ("core", "platforms", "attention_backends", "schedulers", "model_registry", "plugins")


def variables() -> dict[str, str]:
    """Return the description of each environment variable, by name."""
    by_name: dict[str, str] = {}
    for name, description in itertools.chain.from_iterable(map(_declared, _sources())):
        by_name[name] = by_name.get(name) or description
    return dict(sorted(by_name.items()))


def _sources() -> Iterator[ast.Module]:
    files = (sorted((ROOT / folder).glob("**/src/**/*.py")) for folder in _FOLDERS)
    texts = (path.read_text("utf-8") for path in itertools.chain.from_iterable(files))
    return (ast.parse(text) for text in texts if "DOVETAIL_" in text)


def _declared(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for item, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(item, ast.Assign) or not isinstance(item.value, ast.Constant):
            continue
        name = item.value.value
        if isinstance(name, str) and _NAME.fullmatch(name):
            doc = after.value if isinstance(after, ast.Expr) else None
            text = doc.value if isinstance(doc, ast.Constant) else ""
            yield name, " ".join(str(text).split())


def tables() -> dict[str, str]:
    """Return the text of each recorded table."""
    rows = [f"| `{name}` | {text} |" for name, text in variables().items()]
    options = [f"| `--{name.replace('_', '-')}` | {HELP[name]} |" for name in LOGGING]
    return {
        "variables": "\n".join(["| variable | meaning |", "|---|---|", *rows]) + "\n",
        "logging": "\n".join(["| option | meaning |", "|---|---|", *options]) + "\n",
    }


def recorded() -> dict[str, str]:
    """Return the recorded tables of the page."""
    return {name: text for _, name, text, _ in _BLOCK.findall(PAGE.read_text("utf-8"))}


def main() -> None:
    """Rewrite the tables of the page."""
    current = tables()
    text = _BLOCK.sub(lambda m: f"{m[1]}{current[m[2]]}{m[4]}", PAGE.read_text("utf-8"))
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
