"""Reads and writes rows: one JSON object per line. This module does not interpret their fields."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dovetail.errors import RequestError

Row = Mapping[str, Any]


def read_rows(data: object) -> list[tuple[str, Row]]:
    """Return (location, row) for each row of `data`. Error messages name the location.

    data: the path of a UTF-8 file, a string of JSON lines, or a list of mappings. Empty lines are
    skipped. For a line that is not a JSON object, raises a RequestError that names the line.
    """
    if isinstance(data, os.PathLike):
        path = Path(data)
        try:
            text = path.read_text("utf-8-sig")
        except (OSError, UnicodeError) as error:
            raise RequestError(f"{path} cannot be read: {error}", parameter="data") from error
        return _parse(text, f"{path}: ")
    if isinstance(data, str):
        return _parse(data, "")
    if not isinstance(data, (list, tuple)):
        raise RequestError(
            f"data has the type {type(data).__name__}; pass a pathlib.Path, a string of JSON "
            "lines, or a list of mappings.",
            parameter="data",
        )
    rows: list[tuple[str, Row]] = []
    for index, row in enumerate(data):
        if not isinstance(row, Mapping):
            message = f"row {index} has the type {type(row).__name__}; each row must be a mapping."
            raise RequestError(message, parameter="data")
        rows.append((f"row {index}", row))
    return rows


def write_rows(path: str | os.PathLike[str], rows: Iterable[Row]) -> None:
    """Write one JSON object on each line. Replace an existing file.

    Raises OSError if writing fails; an existing file then stays unchanged.
    """
    target = Path(path)
    partial = target.with_name(f"{target.name}.part")
    lines = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    partial.write_text(lines, encoding="utf-8")
    os.replace(partial, target)


def _parse(text: str, where: str) -> list[tuple[str, Row]]:
    rows: list[tuple[str, Row]] = []
    # splitlines() would also split at U+2028 and similar characters inside JSON strings.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"{where}line {number} is not JSON: {error}.", parameter="data"
            ) from None
        if not isinstance(row, dict):
            message = f"{where}line {number} is not a JSON object; write {{...}} on each line."
            raise RequestError(message, parameter="data")
        rows.append((f"{where}line {number}", row))
    return rows
