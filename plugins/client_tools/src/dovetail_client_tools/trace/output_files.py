"""The files of a trace. They appear only when they are complete."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from dovetail.errors import ConfigError
from dovetail_client_tools.trace.perfetto_file import PerfettoFile
from dovetail_client_tools.trace.slices import TraceSink
from dovetail_client_tools.trace.viewer import ViewerPage

_PART = ".part"


@dataclass(frozen=True, kw_only=True)
class Description:
    """Facts about a trace that are known after it was read. rows: names and values.

    notes: warnings.
    """

    title: str
    num_steps: int
    rows: Sequence[tuple[str, str]]
    notes: Sequence[str]


class TraceFiles:
    """Writes the files of a trace. sinks: receive its parts."""

    def __init__(self, perfetto: Path | None, html: Path | None) -> None:
        """Check the paths. Raise ConfigError for a directory that does not exist."""
        if perfetto is None and html is None:
            raise ConfigError("Use --html FILE, --perfetto FILE, or both.")
        if perfetto is not None and perfetto == html:
            raise ConfigError("--html and --perfetto must be different files.")
        for option, path in (("--perfetto", perfetto), ("--html", html)):
            if path is not None and not os.path.isdir(path.absolute().parent):
                raise ConfigError(f"{option} {path} is in a directory that does not exist.")
        self._perfetto, self._html = perfetto, html
        self._writer: PerfettoFile | None = None
        self._page = ViewerPage() if html is not None else None

    @contextmanager
    def write(self) -> Iterator[tuple[Sequence[TraceSink], Callable[[Description], list[str]]]]:
        """Yield the sinks, and a function that completes the files and returns messages."""
        with ExitStack() as stack:
            sinks: list[TraceSink] = []
            if self._perfetto is not None:
                file = stack.enter_context(new_file("--perfetto", self._perfetto))
                self._writer = PerfettoFile(file)
                sinks.append(self._writer)
            if self._page is not None:
                sinks.append(self._page)
            yield sinks, self._finish

    def _finish(self, described: Description) -> list[str]:
        notes = list(described.notes)
        messages = []
        if self._writer is not None:
            self._writer.writer.end()
            shown = f"{self._writer.writer.num_events:,} events"
            messages.append(f"Wrote {self._perfetto}: {shown}. Open it at https://ui.perfetto.dev.")
        if self._page is not None and self._html is not None:
            if not self._page.is_complete:
                notes.append(
                    f"The page shows the first {self._page.num_steps:,} of "
                    f"{described.num_steps:,} steps, because a browser cannot show more. Select "
                    "others with --steps FROM:TO, or use --perfetto."
                )
            with new_file("--html", self._html) as file:
                file.write(self._page.render(described.title, described.rows, notes))
            messages.append(f"Wrote {self._html}. Open it in a browser.")
        return [*notes, *messages]


@contextmanager
def new_file(option: str, path: Path) -> Iterator[TextIO]:
    """Yield a file that gets its name `path` at the end. After an error, it is deleted."""
    part = path.with_name(path.name + _PART)
    try:
        with part.open("w", encoding="utf-8") as file:
            yield file
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror}.") from error
    finally:
        part.unlink(missing_ok=True)
