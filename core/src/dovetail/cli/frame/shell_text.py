"""Rewrites messages and help lines of the Python API for a shell, where None cannot be typed.

In a shell, an option is left out instead of set to None.
"""

from __future__ import annotations

import re

_OR_NONE = re.compile(r"\bmust be None(?:, or | or |, )")
_NONE_MEANS = re.compile(r"\bNone: ")


def shell_message(message: str) -> str:
    """Return an error message without None among the accepted values."""
    return _OR_NONE.sub("must be ", message)


def shell_help(text: str) -> str:
    """Return a help line with "default: …" instead of "None: …"."""
    return _NONE_MEANS.sub("default: ", text)
