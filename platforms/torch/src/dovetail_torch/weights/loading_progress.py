"""A progress bar for loading, shown on stderr if it is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def loading_progress(num_weights: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each weight. `shown`: whether the user enabled the bar."""
    if not (shown and sys.stderr.isatty()):
        yield _count_nothing
        return
    # Imported only if a bar is shown.
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Loading weights", total=num_weights)
        yield lambda: bar.advance(task)


def _count_nothing() -> None:
    """Do nothing: no bar is shown."""
