"""The command line, `dovetail`: a thin layer over the library.

Each command has its own module, which is imported when the command runs, but not for `--help`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code. arguments: None for the process's arguments."""
    tokens = sys.argv[1:] if arguments is None else list(arguments)
    if tokens == ["--version"]:
        # The parser would take longer than the answer.
        from dovetail.cli.frame.version import version_text

        print(version_text())
        return 0
    from dovetail.cli import app

    return app.main(tokens)
