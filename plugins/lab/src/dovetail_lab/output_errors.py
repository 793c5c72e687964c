"""Converts an OSError from writing an output file to a UserError that names the option."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dovetail.errors import UserError


@contextmanager
def output_errors(option: str, path: Path) -> Iterator[None]:
    """Raise UserError instead of OSError; option: the option that names `path`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{option}={str(path)!r} cannot be written: {reason}.") from error
