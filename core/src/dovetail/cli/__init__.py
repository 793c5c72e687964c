"""The command line, `dovetail`: a thin layer over the library.

Each command has its own module, which is imported when the command runs, but not for `--help`.
"""

from dovetail.cli.app import main

__all__ = ["main"]
