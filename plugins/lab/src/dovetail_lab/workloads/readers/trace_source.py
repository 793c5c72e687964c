"""Finds a trace by name or path, detects its format and reads a range of its rows."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from dovetail.errors import UserError, nearest
from dovetail_lab.workloads.readers.azure import COLUMNS as AZURE_COLUMNS
from dovetail_lab.workloads.readers.azure import read_azure
from dovetail_lab.workloads.readers.burstgpt import COLUMNS as BURSTGPT_COLUMNS
from dovetail_lab.workloads.readers.burstgpt import read_burstgpt
from dovetail_lab.workloads.readers.decision_log import read_decision_log
from dovetail_lab.workloads.readers.lines import first_line
from dovetail_lab.workloads.readers.mooncake import read_mooncake
from dovetail_lab.workloads.readers.sharegpt import load_counter, read_sharegpt
from dovetail_lab.workloads.readers.trace_row import TraceError, TraceRow

FileVersion = tuple[int, int, int, int]
Reader = Callable[[Path], Iterator[TraceRow]]

SHIPPED: Mapping[str, str] = {
    "azure:code": "azure_llm_2023_code.csv.xz",
    "azure:conv": "azure_llm_2023_conv.csv.xz",
    "mooncake:conversation": "mooncake_conversation.jsonl.xz",
    "mooncake:synthetic": "mooncake_synthetic.jsonl.xz",
}
"""Maps the names of the traces in this package to their files."""

READERS: Mapping[str, Reader] = {
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "mooncake": read_mooncake,
    "sharegpt": read_sharegpt,
    "log": read_decision_log,
}
"""Maps the name of a format to its reader."""

_FOLDER = Path(__file__).parents[1] / "traces"
_LOG_MAGIC = b"dovetail decisions "


@dataclass(frozen=True, kw_only=True)
class TraceSource:
    """An existing trace: its name in reports, its file and its format."""

    name: str
    path: Path
    format: str
    tokenizer: str = ""

    def rows(self, start: int = 0, count: int | None = None) -> Iterator[TraceRow]:
        """Yield `count` rows from the row `start`, or all rows if `count` is None.

        Reads the file only up to the last yielded row.
        """
        reader = READERS[self.format]
        if self.format == "sharegpt" and self.tokenizer:
            reader = partial(read_sharegpt, count=load_counter(Path(self.tokenizer)))
        return islice(reader(self.path), start, None if count is None else start + count)

    def version(self) -> FileVersion:
        """Return device, inode, size and modification time, which change when the file changes."""
        stat = self.path.stat()
        return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns

    def digest(self) -> str:
        """Return the SHA-256 of the file, in hexadecimal."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def find_trace(reference: str, *, tokenizer: str = "") -> TraceSource:
    """Return the trace with a name of `SHIPPED`, or at a path.

    reference: "azure:conv", a path, or "FORMAT:PATH" if the format cannot be detected. tokenizer: a
    model directory, for formats with texts. Raises UserError if it does not exist.
    """
    if reference in SHIPPED:
        path = _FOLDER / SHIPPED[reference]
        name = reference.partition(":")[0]
        return TraceSource(name=reference, path=path, format=name)
    prefix, _, rest = reference.partition(":")
    if rest and prefix in READERS and not os.path.exists(reference):
        path, kind = Path(rest), prefix
    else:
        path, kind = Path(reference), ""
    if not os.path.isfile(path):
        hint = nearest(reference, SHIPPED)
        raise UserError(
            f"trace {reference!r} is neither a file nor one of {', '.join(SHIPPED)}.{hint}"
        )
    kind = kind or _detect(path)
    return TraceSource(name=path.name, path=path, format=kind, tokenizer=tokenizer)


def _detect(path: Path) -> str:
    """Return the format of a file, from its first line."""
    with path.open("rb") as file:
        if file.read(len(_LOG_MAGIC)) == _LOG_MAGIC:
            return "log"
    line = first_line(path).strip()
    columns = {name.strip().strip('"') for name in line.split(",")}
    if columns.issuperset(AZURE_COLUMNS):
        return "azure"
    if columns.issuperset(BURSTGPT_COLUMNS):
        return "burstgpt"
    if line.startswith("[") or '"conversations"' in line:
        return "sharegpt"
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = {}
    if isinstance(fields, dict) and {"timestamp", "input_length"} <= fields.keys():
        return "mooncake"
    if not line:
        raise TraceError(str(path), 1, "the line is empty, so the format is not known.")
    raise TraceError(
        str(path),
        1,
        "the format is not known. Write FORMAT:PATH with one of " + ", ".join(READERS) + ".",
    )
