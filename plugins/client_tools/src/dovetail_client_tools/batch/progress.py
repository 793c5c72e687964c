"""Shows the progress of a batch on stderr: a bar on a terminal, otherwise a few lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dovetail.cli.terminal import count_text
from dovetail_client_tools.batch.runner import Progress

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows progress."""
    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _line_printer(console)
        return
    columns = (
        bars.TextColumn("lines"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[failed]} failed"),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=None, failed=0)

        def show(progress: Progress) -> None:
            bar.update(
                task,
                total=progress.num_lines,
                completed=progress.num_done,
                failed=progress.num_failed,
            )

        yield show


def _line_printer(console: Console) -> Callable[[Progress], None]:
    last_tenth = 0

    def show(progress: Progress) -> None:
        nonlocal last_tenth
        tenth = 10 * progress.num_done // progress.num_lines
        if tenth > last_tenth:
            last_tenth = tenth
            console.print(
                f"{progress.num_done:,} of {count_text(progress.num_lines, 'line')}, "
                f"{progress.num_failed:,} failed",
                highlight=False,
            )

    return show
