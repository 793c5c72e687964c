"""Prints a random sample of the project's texts, for a reader who judges the language.

python tests/architecture/language_sample.py --seed 7 --size 200

The sample has the same number of docstrings, messages of errors, test names and sentences of
documents. The result of a judgement goes to docs/log.md with the seed and the commit.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MIN_WORDS = 4
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\[])")
_LEFT_OUT = ("docs/log.md", "CHANGELOG.md", "docs/plugins/commands.md")
"""Documents that are records: a history, and outputs of commands."""


def main() -> None:
    """Draw and print the sample."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--size", type=int, default=200, help="number of texts in the sample")
    options = parser.parse_args()
    texts: dict[str, list[str]] = {"docstring": [], "message": [], "test name": [], "sentence": []}
    for file in _files("*.py"):
        _collect_code(file, texts)
    for file in _files("*.md"):
        if file not in _LEFT_OUT:
            texts["sentence"] += [f"{file}: {item}" for item in _sentences(file)]
    chosen = random.Random(options.seed)
    number = 0
    for kind, result in texts.items():
        print(f"\n# {kind}s ({len(result)} in total)")
        for item in chosen.sample(result, options.size // len(texts)):
            number += 1
            print(f"{number}. {item}")


def _files(pattern: str) -> list[str]:
    done = subprocess.run(
        ["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def _collect_code(file: str, texts: dict[str, list[str]]) -> None:
    is_test = "/tests/" in f"/{file}"
    for node in ast.walk(ast.parse((ROOT / file).read_text("utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            name = getattr(node, "name", file)
            doc = ast.get_docstring(node)
            if doc and not name.startswith("test_"):
                texts["docstring"].append(f"{file}: {name}: {' '.join(doc.split())[:600]}")
            if is_test and name.startswith("test_"):
                texts["test name"].append(f"{file}: {name}")
        elif isinstance(node, ast.Raise) and node.exc is not None and not is_test:
            texts["message"] += [f"{file}: {text}" for text in _messages(node.exc)]


def _messages(node: ast.expr) -> Iterator[str]:
    """Yield the text of a raised error, with its parameters as source code in braces."""
    for argument in node.args if isinstance(node, ast.Call) else ():
        parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
        words = [
            ast.unparse(part).strip("f'\"") if isinstance(part, ast.FormattedValue) else part.value
            for part in parts
            if isinstance(part, (ast.Constant, ast.FormattedValue))
        ]
        text = " ".join("".join(map(str, words)).split())
        if len(text.split()) >= MIN_WORDS and not isinstance(argument, ast.Name):
            yield text


def _sentences(file: str) -> Iterator[str]:
    """Yield the sentences of the paragraphs of a document, without code blocks and tables."""
    text = re.sub(r"```.*?```", "", (ROOT / file).read_text("utf-8"), flags=re.DOTALL)
    for paragraph in text.split("\n\n"):
        lines = [line.strip() for line in paragraph.splitlines()]
        if any(line.startswith(("#", "|", "<", "![")) for line in lines):
            continue
        for sentence in _SENTENCE.split(" ".join(lines)):
            if len(sentence.split()) >= MIN_WORDS:
                yield sentence


if __name__ == "__main__":
    sys.exit(main())
