"""Properties on the pages about policies: code lines, options, guarantees and killed mutants.

They are read from entry points, classes, and the tables of mutants in the tests of each member.
`record_schedulers.py` writes them between two marks of each page.
"""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "schedulers"
TABLE = ROOT / "docs" / "schedulers.md"
END = "<!-- end -->"
_KIT = "meets_its_contract"


@dataclass(frozen=True, kw_only=True)
class PolicyFacts:
    """One policy. options: (name, default). guarantees: map of a guarantee to the mutants that
    violate it."""

    name: str
    source: Path
    options: tuple[tuple[str, str], ...]
    guarantees: dict[str, list[str]]

    @property
    def num_lines(self) -> int:
        return len(self.source.read_text("utf-8").splitlines())

    @property
    def docstring(self) -> str:
        return ast.get_docstring(ast.parse(self.source.read_text("utf-8"))) or ""

    @property
    def page(self) -> Path:
        return PAGES / f"{self.name}.md"

    @property
    def paper(self) -> str:
        """The citation of the paper on the page, without the title."""
        text = " ".join(self.page.read_text("utf-8").split())
        return re.search(r"\*\*Source\.\*\* (.*?)(?:: |\. )", text).group(1)

    def render(self) -> str:
        """Return the recorded part of the page."""
        has_mutants = any(self.guarantees.values())
        suffix = ", each with the mutants that violate it" if has_mutants else ""
        lines = [f"**Tested guarantees**{suffix}:", ""]
        for text, mutants in self.guarantees.items():
            failing = f" ({', '.join(f'`{name}`' for name in mutants)})" if mutants else ""
            lines.append(f"- {text}{failing}")
        where = self.source.relative_to(ROOT).as_posix()
        return "\n".join([*lines, "", f"{self.num_lines} lines: `{where}`."])


def read_facts() -> list[PolicyFacts]:
    """Return the properties of every first-party policy, sorted by name."""
    info = []
    for member in sorted(ROOT.glob("schedulers/*/pyproject.toml")):
        points = tomllib.loads(member.read_text("utf-8"))["project"]["entry-points"]
        names = list(points["dovetail.policy"])
        for name, target in points["dovetail.policy"].items():
            module, _, attribute = target.partition(":")
            loaded = importlib.import_module(module)
            info.append(
                PolicyFacts(
                    name=name,
                    source=Path(loaded.__file__),
                    options=_options(getattr(loaded, attribute)),
                    guarantees=_guarantees(name, names, member.parent / "tests"),
                )
            )
    return sorted(info, key=lambda item: item.name)


def render_table(info: list[PolicyFacts]) -> str:
    """Return the table of all policies."""
    rows = [
        "| policy | source | options | guarantees tested | mutants killed | lines |",
        "|---|---|---|---|---|---|",
    ]
    for properties in info:
        options = ", ".join(f"`{name}={default}`" for name, default in properties.options) or "–"
        killed = sum(len(mutants) for mutants in properties.guarantees.values()) or "–"
        rows.append(
            f"| [`{properties.name}`](schedulers/{properties.name}.md) | {properties.paper} | "
            f"{options} | {'; '.join(properties.guarantees)} | {killed} | {properties.num_lines} |"
        )
    return "\n".join(rows)


def recorded(text: str, mark: str) -> str:
    """Return the text between the marks."""
    return text.partition(f"<!-- recorded: {mark} -->\n")[2].partition(END)[0].strip("\n")


def record(text: str, mark: str, info: str) -> str:
    """Return `text` with `info` between the marks."""
    begin = f"<!-- recorded: {mark} -->\n"
    head, _, rest = text.partition(begin)
    return f"{head}{begin}{info}\n{END}{rest.partition(END)[2]}"


def _options(policy_cls: type) -> tuple[tuple[str, str], ...]:
    model = getattr(policy_cls, "options_model", None)
    fields = model.model_fields if model is not None else {}
    return tuple((name, repr(field.default)) for name, field in fields.items())


def _guarantees(name: str, names: list[str], tests: Path) -> dict[str, list[str]]:
    """Return the mutants of each guarantee. The names of the policy's checks are its guarantees.

    If it is the only policy of its member, its test names are the guarantees.
    """
    by_name: dict[str, list[str]] = {}
    for path in sorted(tests.glob("test_*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        killed = _mutants_by_guarantee(tree)
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef):
                continue
            prefix = "test_" if len(names) == 1 else f"{name}_"
            if node.name.startswith(prefix) and not node.name.endswith(_KIT):
                text = node.name.removeprefix(prefix).replace("_", " ")
                by_name[text] = killed.get(node.name, [])
    return by_name


def _mutants_by_guarantee(tree: ast.Module) -> dict[str, list[str]]:
    """Return a map of guarantee to mutants, from the module's table MUTANTS."""
    killed: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MUTANTS":
            for row in node.value.elts:
                _, mutant, check = map(ast.unparse, row.elts)
                killed.setdefault(check, []).append(mutant)
    return killed
