"""Rewrites messages and help lines for a shell, where None and null cannot be typed.

In a shell, an option is left out instead of set to None.
"""

from __future__ import annotations

import re

_OR_NONE = re.compile(r"\bmust be (?:None|null)(?:, or | or |, )")
_NONE_MEANS = re.compile(r"\bNone: ")


def shell_message(message: str) -> str:
    """Return an error message without None or null among the accepted values."""
    return _OR_NONE.sub("must be ", message)


def shell_help(text: str) -> str:
    """Return a help line with "default: …" instead of "None: …"."""
    return _NONE_MEANS.sub("default: ", text)
