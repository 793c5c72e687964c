"""The working directory: whether this process has one that it can use.

It may have been deleted, or be too deep or closed to this user. Relative paths then mean nothing,
and math libraries that torch loads end the process, so an engine refuses to start.
"""

from __future__ import annotations

import os

from dovetail.errors import ConfigError

_MAX_BYTES = 4096 - 256
"""Of a path that a file name can still be added to (PATH_MAX of Linux, less NAME_MAX)."""


def check_working_directory() -> None:
    """Raise ConfigError if the working directory is gone, too deep or not accessible."""
    if problem := working_directory_problem():
        raise ConfigError(
            f"The working directory of this process {problem}.\n"
            "Change to a directory that exists and can be used, such as `cd /`, and start again."
        )


def working_directory_problem() -> str:
    """Return what is wrong with the working directory, as a phrase; "" for nothing."""
    try:
        path = os.getcwd()
        num_bytes = len(os.fsencode(path))
        if num_bytes > _MAX_BYTES:
            return f"has a path of {num_bytes} bytes; {_MAX_BYTES} is the most that can be used"
        os.stat(os.path.join(path, "."))
    except FileNotFoundError:
        return "does not exist any more: it was deleted"
    except OSError as error:
        return f"cannot be used: {error.strerror or error}"
    return ""
