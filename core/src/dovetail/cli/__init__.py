"""The command line, `dovetail`: a thin layer over the library.

The module of a command is imported only when the command runs, not for `--help`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code. arguments: None for `sys.argv`."""
    tokens = sys.argv[1:] if arguments is None else list(arguments)
    if tokens == ["--version"]:
        # Handled here, because importing the parser takes longer.
        from dovetail.cli.frame.version import version_text

        with suppress(OSError):  # reported below
            print(version_text(), flush=True)
            return 0
    from dovetail.cli import app

    return app.main(tokens)
