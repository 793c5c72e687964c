"""No name, docstring, comment, message, test name or document contains a retired word."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest

from architecture.sources import ROOT, documents, native_files, written_files

LIST = ROOT / "tests" / "architecture" / "retired_words.toml"
AFTER_NO = r"(?![\s_]+(?:longer|more|less|such|other)(?![A-Za-z]))"
"""Words that may follow "is no": "is no longer" is plain English."""


@cache
def table() -> dict[str, Any]:
    """Return the content of `LIST`."""
    return tomllib.loads(LIST.read_text("utf-8"))


@cache
def retired_words(folder: str = "") -> Mapping[str, str]:
    """Return each retired word with its replacement.

    folder: return the words that are retired in one folder only.
    """
    words: dict[str, str] = (
        table()["folders"][folder]
        if folder
        else table()["names"] | table()["phrases"] | table()["spellings"]
    )
    return words


def pattern_of(word: str) -> str:
    """Return the regular expression that matches a word, a phrase or a part of a word."""
    if word in table()["spellings"]:
        return f"(?i:{word}(?=[aei]))" if word.endswith(("is", "ys")) else f"(?i:{word})"
    spaced = re.escape(word).replace(r"\ ", r"(?:[ _]|\s*\n\s*(?:(?:#|//|\*)\s*)?)")
    whole = rf"(?<![A-Za-z])(?i:{spaced})(?![A-Za-z])"
    if word.endswith("is no"):
        return whole + AFTER_NO
    # Part of a CamelCase name: `Lobby` in `OtherLobbyTest`.
    return (
        rf"{whole}|(?<=[a-z]){word}(?![a-z])|(?<![A-Za-z]){word}(?=[A-Z])"
        if word[0].isupper()
        else whole
    )


@cache
def patterns(folder: str) -> tuple[tuple[str, str, re.Pattern[str]], ...]:
    """Return (word, its lower-case beginning, its pattern) for each retired word of a folder."""
    words = retired_words(folder)
    return tuple((word, word.split()[0].lower(), re.compile(pattern_of(word))) for word in words)


def find_retired(text: str, name: str = "") -> Iterator[str]:
    """Yield "line: word. Write replacement" for each retired word in `text`.

    name: the path of the file relative to the root of the repository.
    """
    lower = text.lower()
    for folder in ("", *(item for item in table()["folders"] if name.startswith(f"{item}/"))):
        for word, beginning, pattern in patterns(folder):
            for match in pattern.finditer(text) if beginning in lower else ():
                line = text.count("\n", 0, match.start()) + 1
                yield f"{line}: {word!r} is retired; write {retired_words(folder)[word]}"


@pytest.mark.costly
def test_no_file_uses_a_retired_word():
    """The names of files are checked, too."""
    collected = []
    for path in (*written_files(), *native_files(), *documents(), ROOT / "Makefile"):
        name = str(path.relative_to(ROOT))
        if name not in table()["exempt"]:
            collected += [f"{name}:{item}" for item in find_retired(path.read_text("utf-8"), name)]
            collected += [f"{name}: file name: {item}" for item in find_retired(name)]
    assert not collected, "\n".join(collected)


def test_words_of_a_folder_are_retired_in_its_files_only():
    text = "class SectionSpec:\n    figures: tuple[MetricSpec, ...] = ()"
    expected = ["2: 'figures' is retired; write metrics"]
    assert list(find_retired(text, "bench/gpu/catalog.py")) == expected
    assert list(find_retired(text, "plugins/lab/tests/test_lab_reports.py")) == []


def test_every_exempt_file_exists():
    assert [name for name in table()["exempt"] if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("class Gatehouse:", "1: 'Gatehouse' is retired; write AdmissionGates"),
        ("x = 1\nself._lobby = y", "2: 'Lobby' is retired; write HeldRequests"),
        ("def test_the_cohort_grows():", "1: 'Cohort' is retired; write DecodeBatch"),
        ("class FullLobbyTest:", "1: 'Lobby' is retired; write HeldRequests"),
        ("class LobbyOfTwo:", "1: 'Lobby' is retired; write HeldRequests"),
        ('raise E("Mend it, or wait.")', "1: 'mend' is retired; write fix"),
        ("def test_who_is_told_of_it():", "1: 'told of' is retired; write notified of"),
        ("# a request is told\n# of the end", "1: 'told of' is retired; write notified of"),
        ("A value that is no list.", "1: 'that is no' is retired; write that is not a"),
        ("// A request is told\n// of the end", "1: 'told of' is retired; write notified of"),
        ("x = quantise_tile(y)", "1: 'quantis' is retired; write quantiz"),
        ("class Dequantisation:", "1: 'quantis' is retired; write quantiz"),
        ("float NORMALISED = 1;", "1: 'normalis' is retired; write normaliz"),
        ("SeesNeighbours", "1: 'neighbour' is retired; write neighbor"),
    ],
)
def test_a_retired_word_is_reported_with_line_and_replacement(text, expected):
    assert list(find_retired(text)) == [expected]


@pytest.mark.parametrize(
    "text",
    [
        "A recommendation, an amendment and a pulsed laser.",
        "a request that is no longer needed",
        "def test_the_hotel_lobbyist(): ...",
        "There is no list. It was told off.",
        "an optimistic realist raises otherwise precise noise in parallelism",
    ],
)
def test_ordinary_words_are_not_reported(text):
    assert list(find_retired(text)) == []
