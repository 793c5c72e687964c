"""The files with the results of a run, and finished formats from the files of an earlier run."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pydantic

from quality.formats import REFERENCES, Format
from quality.report import plot, tables

JSON_NAME = "quality.json"
MAX_JSON_BYTES = 16 << 20


class _Text(pydantic.BaseModel):
    perplexity: float
    kl: dict[str, float | None]
    same_best: dict[str, float | None]


class _Row(pydantic.BaseModel):
    weights: Literal["off grid", "published"]
    format: str
    engine: str
    definition: dict[str, Any]
    commit: str
    bytes_per_weight: float
    texts: dict[str, _Text]


class _Origin(pydantic.BaseModel):
    commit: str
    settings: dict[str, Any]


class _Results(pydantic.BaseModel):
    origin: _Origin
    rows: list[_Row]
    layers: dict[str, dict[str, float]]


class ResultsError(Exception):
    """The results of an earlier run cannot be used."""


def write(result: Mapping[str, Any], folder: Path) -> str:
    """Write the JSON file, the table and, with matplotlib, the plot. Return the table.

    Replaces the JSON file in one step, so that an interrupted run leaves complete results.
    """
    content = json.dumps(result, indent=1, allow_nan=False) + "\n"
    partial = folder / f"{JSON_NAME}.partial"
    partial.write_text(content, encoding="utf-8")
    partial.replace(folder / JSON_NAME)
    document = tables(result)
    (folder / "quality.md").write_text(document, encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is not None:
        plot(result, folder / "quality.png")
    return document


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """Metrics of an earlier run: rows of formats, and errors of layers."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    layers: dict[str, dict[str, float]] = field(default_factory=dict)


def earlier(folder: Path, settings: Mapping[str, Any]) -> Earlier:
    """Return the results of an earlier run, or empty results if the file does not exist.

    Raises ResultsError if the file is damaged or has different settings.
    """
    path = folder / JSON_NAME
    if not path.exists():
        return Earlier()
    result = read(path)
    before = result["origin"]["settings"]
    names = [name for name, value in settings.items() if before.get(name) != value]
    if names:
        raise ResultsError(f"{path} has different settings: {', '.join(names)}; use another --out")
    return Earlier(rows=result["rows"], layers=result["layers"])


def read(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file of results. Raises ResultsError if the file is invalid."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}") from None
    if len(content) > MAX_JSON_BYTES:
        raise ResultsError(f"{path} has more than {MAX_JSON_BYTES} bytes")
    try:
        result: dict[str, Any] = json.loads(content)
        _Results.model_validate(result)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ResultsError(f"{path} is not a result of quality.py: {reason}") from None
    return result


def definition(first: Format) -> dict[str, Any]:
    """Return the settings of a format as they are in the JSON file."""
    actual = asdict(first)
    del actual["name"]
    return {**actual, "options": dict(first.options)}


def finished(rows: Sequence[Mapping[str, Any]], weights: str, first: Format) -> bool:
    """Return whether the rows include this format with the same definition."""
    return any(
        (row["weights"], row["format"], row["definition"])
        == (weights, first.name, definition(first))
        for row in rows
    )


def complete(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with all metrics of the references, which were measured first.

    The divergence of a reference from itself is 0. Of the two references, only the second was
    compared with the first; the opposite divergence is None.
    """
    return [{**row, "texts": _completed(row)} for row in rows]


def _completed(row: Mapping[str, Any]) -> dict[str, Any]:
    result = {}
    for name, text in row["texts"].items():
        missing = [reference for reference in REFERENCES if reference not in text["kl"]]
        same = [reference == row["format"] for reference in missing]
        kl = {key: 0.0 if is_same else None for key, is_same in zip(missing, same, strict=True)}
        best = {key: 1.0 if is_same else None for key, is_same in zip(missing, same, strict=True)}
        result[name] = {
            **text,
            "kl": {**text["kl"], **kl},
            "same_best": {**text["same_best"], **best},
        }
    return result
