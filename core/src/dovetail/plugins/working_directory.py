"""Checks that this process has a usable working directory.

The directory may be deleted or not accessible, or its path may be too long. In these cases relative
paths do not work, and math libraries that torch loads abort the process, so the engine does not
start.
"""

from __future__ import annotations

import os

from dovetail.errors import ConfigError

_MAX_BYTES = 4096 - 256
"""Maximum length of a path to which a file name can be appended (PATH_MAX - NAME_MAX)."""


def check_working_directory() -> None:
    """Raise ConfigError if the working directory cannot be used or its path is too long."""
    if problem := working_directory_problem():
        raise ConfigError(
            f"The working directory of this process {problem}.\n"
            "Change to another directory, for example with `cd /`, and start again."
        )


def working_directory_problem() -> str:
    """Return what is wrong with the working directory, as a phrase, or "" for nothing."""
    try:
        path = os.getcwd()
        num_bytes = len(os.fsencode(path))
        if num_bytes > _MAX_BYTES:
            return f"has a path of {num_bytes} bytes; the maximum is {_MAX_BYTES}"
        os.stat(os.path.join(path, "."))
    except FileNotFoundError:
        return "was deleted"
    except OSError as error:
        return f"cannot be used: {error.strerror or error}"
    return ""
