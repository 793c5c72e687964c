"""What it means that a model could not be made on the device "meta", which has no memory."""

from __future__ import annotations

_MISTAKES = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, TypeError)
"""What mistakes in a model or its config raise on every device."""


def fails_on_any_device(error: BaseException) -> bool:
    """Return whether what a model's constructor raised has nothing to do with the device."""
    return isinstance(error, _MISTAKES) and "meta" not in str(error).lower()
