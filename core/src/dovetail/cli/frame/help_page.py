"""`--help` shows the main options of a command, and `--help-all` every option.

A command puts its rare options into a group of the parser whose name starts with `MORE`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cyclopts import Group

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions

FLAG = "--help-all"
MORE = "More "
"""Prefix of the names of option groups that `--help` does not show."""


def more_options(subject: str, *, sort_key: int = 9) -> Group:
    """Return the group for rare options. subject: the word after `MORE` in the group's name."""
    return Group(f"{MORE}{subject} options", sort_key=sort_key)


class HelpFormatter:
    """Prints the panels of a help page. show_all: whether rare options are shown."""

    def __init__(self, *, show_all: bool) -> None:
        self._show_all = show_all

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print one panel, or the number of its options if it is hidden."""
        title = str(panel.title)
        if not self._show_all and title.startswith(MORE):
            console.print(f"{len(panel.entries)} {title.lower()}: {FLAG}", highlight=False)
            return
        from cyclopts.help.formatters import DefaultFormatter  # slow to import

        DefaultFormatter()(console, options, panel)
