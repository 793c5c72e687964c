"""A private directory for the sockets and files of an engine's processes.

Its path is short enough for sockets, because the system limits the length of socket paths.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from dovetail.errors import ConfigError

MAX_SOCKET_PATH_BYTES = 107
MAX_NAME_BYTES = 16
"""Maximum length of a file name in a private directory."""


def make_private_folder() -> Path:
    """Create a directory (0700) under TMPDIR or the system's default. The caller removes it.

    Raises ConfigError, naming TMPDIR, if it cannot be created or its path is too long for sockets.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="dovetail-"))
    except OSError as error:
        raise ConfigError(
            f"The directory for the engine's sockets cannot be created ({error}). Set TMPDIR to an "
            "existing, writable directory with free space."
        ) from None
    length = len(os.fsencode(folder)) + 1 + MAX_NAME_BYTES
    if length > MAX_SOCKET_PATH_BYTES:
        folder.rmdir()
        raise ConfigError(
            f"TMPDIR={str(folder.parent)!r} is too long: its sockets would have paths of "
            f"{length} bytes, and the limit is {MAX_SOCKET_PATH_BYTES}. Set it to a shorter path, "
            "such as /tmp."
        )
    return folder
