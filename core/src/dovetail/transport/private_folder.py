"""A folder for the sockets and files of an engine's processes: this user's alone, and not too deep.

Knows only that sockets will lie in it, whose paths the system allows few characters.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from dovetail.errors import ConfigError

MAX_SOCKET_PATH_BYTES = 107
MAX_NAME_BYTES = 16
"""Of a file in such a folder."""


def make_private_folder() -> Path:
    """Return a new folder (0700) under TMPDIR or the system's own; the caller removes it.

    Raises ConfigError, naming TMPDIR, where none can be made or sockets in it cannot be opened.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="dovetail-"))
    except OSError as error:
        raise ConfigError(
            f"No folder for an engine's sockets can be made ({error}): let TMPDIR name a directory "
            "that exists, is yours to write to and has room."
        ) from None
    length = len(os.fsencode(folder)) + 1 + MAX_NAME_BYTES
    if length > MAX_SOCKET_PATH_BYTES:
        folder.rmdir()
        raise ConfigError(
            f"TMPDIR={str(folder.parent)!r} is too long: sockets in it would have paths of "
            f"{length} bytes, and {MAX_SOCKET_PATH_BYTES} are allowed. Let it name a shorter one, "
            "such as /tmp."
        )
    return folder
