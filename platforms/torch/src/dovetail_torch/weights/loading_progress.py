"""A progress bar for loading: on stderr, where that is a terminal; nothing anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def loading_progress(num_weights: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Yield a function to be called after each weight. `shown`: the user wants to see it."""
    if not (shown and sys.stderr.isatty()):
        yield _count_nothing
        return
    # Only who sees a bar pays for importing it.
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Loading weights", total=num_weights)
        yield lambda: bar.advance(task)


def _count_nothing() -> None:
    """Take note of a weight where nobody looks."""
