"""Paths that users state in options and environment variables."""

from __future__ import annotations

from pathlib import Path

from dovetail.errors import ConfigError
from dovetail.value_checks import shorten


def user_path(name: str, stated: str) -> Path:
    """Return the path `stated`, with a home directory instead of a leading "~" or "~user".

    name: of the option or variable, for the ConfigError if the home directory is not known or the
    path has a null character.
    """
    if "\0" in stated:
        raise ConfigError(f"{name}={shorten(stated)} has a null character.")
    try:
        return Path(stated).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{name}={shorten(stated)}: the home directory of the user is not known. Use an "
            "absolute path."
        ) from None
