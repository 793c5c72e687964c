"""A progress bar for the start of an engine, shown on stderr if it is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(title: str, total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each step of `total`.

    shown: whether the user enabled the bar.
    """
    if not (shown and sys.stderr.isatty()):
        yield _count_nothing
        return
    # Imported only if a bar is shown.
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def _count_nothing() -> None:
    """Do nothing: no bar is shown."""
