"""Errors of models that cannot be created on the device "meta", which has no memory."""

from __future__ import annotations

_MISTAKES = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, TypeError)
"""Exceptions for errors in a model or its config, which every device would raise."""


def fails_on_any_device(error: BaseException) -> bool:
    """Return whether a model's constructor would raise this exception on every device."""
    return isinstance(error, _MISTAKES) and "meta" not in str(error).lower()
