"""The command line, `dovetail`. A face of the library: it holds no logic of its own.

One module a command; a command's module is imported when that command runs, not for `--help`.
"""

from dovetail.cli.app import main

__all__ = ["main"]
