"""Docstrings, comments, messages, test names and document sentences, with file and line number.

Run it to print a random sample for a reviewer:

    python tests/architecture/texts.py --sample 200 --seed 1

The sample takes the same number of docstrings, messages, test names and sentences. Without --sample
all texts are printed. Messages are string constants of shipped code with at least three words.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeGuard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from architecture import sources  # needs the path set above when run as a script

SAMPLED_KINDS = ("docstring", "message", "test name", "sentence")
MIN_WORDS = 3
STYLE_PAGE = "docs/style.md"
"""This page quotes odd sentences as examples, so samples never contain its texts."""
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`\"*\[])")
_LIST_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")


@dataclass(frozen=True, kw_only=True)
class Text:
    """One text. path: relative to the project. line: number of its first line, from 1."""

    kind: str
    path: str
    line: int
    text: str


def python_texts(path: str, source: str, *, shipped: bool) -> Iterator[Text]:
    """Yield the texts of a Python file. shipped: True if users may see its strings."""
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                docstrings.add(node.value)
                yield Text(
                    kind="docstring", path=path, line=node.lineno, text=_joined(node.value.value)
                )
        elif _is_test(node):
            yield Text(kind="test name", path=path, line=node.lineno, text=node.name)
    if shipped:
        for line, text in _strings(tree, docstrings):
            if len(re.findall(r"[A-Za-z]{2,}", text)) >= MIN_WORDS and " " in text:
                yield Text(kind="message", path=path, line=line, text=_joined(text))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            yield Text(kind="comment", path=path, line=token.start[0], text=text)


def markdown_texts(path: str, source: str) -> Iterator[Text]:
    """Yield the sentences of a document: paragraphs, list items, headings, table cells."""
    paragraph: list[str] = []
    first, fenced = 1, False
    for number, line in enumerate([*source.splitlines(), ""], start=1):
        is_fence = line.lstrip().startswith("```")
        is_code = fenced or is_fence or (line.startswith("    ") and not paragraph)
        alone = line.startswith(("#", "|"))
        if paragraph and (is_code or alone or not line.strip() or _LIST_ITEM.match(line)):
            yield from _sentences(path, first, " ".join(paragraph))
            paragraph = []
        fenced ^= is_fence
        if is_code or not line.strip():
            continue
        if alone:
            for cell in line.strip("# |").split(" | "):
                yield from _sentences(path, number, cell)
            continue
        if not paragraph:
            first = number
        paragraph.append(_LIST_ITEM.sub("", line).strip())


def all_texts() -> Iterator[Text]:
    """Yield the texts of every file of the project."""
    shipped = set(sources.shipped_files())
    for path in sources.written_files():
        name = str(path.relative_to(sources.ROOT))
        yield from python_texts(name, path.read_text("utf-8"), shipped=path in shipped)
    for path in sources.documents():
        yield from markdown_texts(str(path.relative_to(sources.ROOT)), path.read_text("utf-8"))


def sample_texts(texts: Iterable[Text], num: int, seed: int) -> list[Text]:
    """Return `num` texts, sampled at random in equal parts from `SAMPLED_KINDS`."""
    by_kind: dict[str, list[Text]] = {kind: [] for kind in SAMPLED_KINDS}
    for text in texts:
        if text.kind in by_kind and text.path != STYLE_PAGE:
            by_kind[text.kind].append(text)
    random = Random(seed)
    sampled: list[Text] = []
    for index, kind in enumerate(SAMPLED_KINDS):
        share = num // len(SAMPLED_KINDS) + (index < num % len(SAMPLED_KINDS))
        sampled += random.sample(by_kind[kind], min(share, len(by_kind[kind])))
    return sampled


def _is_test(node: ast.AST) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return is_function and node.name.startswith("test_")


def _is_string(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _strings(tree: ast.Module, docstrings: set[ast.Constant]) -> Iterator[tuple[int, str]]:
    """Yield the strings that are not docstrings, with `{…}` for the values of f-strings."""
    inner: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and node not in inner:
            inner.update(ast.walk(node))
            parts = (
                value.value if isinstance(value, ast.Constant) else "{…}" for value in node.values
            )
            yield node.lineno, "".join(str(part) for part in parts)
        elif _is_string(node) and node not in inner and node not in docstrings:
            yield node.lineno, node.value


def _sentences(path: str, line: int, paragraph: str) -> Iterator[Text]:
    for sentence in _SENTENCE_END.split(paragraph):
        if len(re.findall(r"[A-Za-z]{2,}", sentence)) >= MIN_WORDS:
            yield Text(kind="sentence", path=path, line=line, text=_joined(sentence))


def _joined(text: str) -> str:
    return " ".join(text.split())


def main() -> int:
    """Print a sample, or all texts: kind, path with line number, and text, separated by tabs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sample", type=int, default=0, metavar="N", help="number of texts in the sample"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers")
    args = parser.parse_args()
    texts: Iterable[Text] = all_texts()
    if args.sample:
        texts = sample_texts(texts, args.sample, args.seed)
    for text in texts:
        print(f"{text.kind}\t{text.path}:{text.line}\t{text.text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
