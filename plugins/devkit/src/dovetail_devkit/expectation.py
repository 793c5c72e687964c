"""Functions that raise AssertionError for a violated rule, even if Python runs with -O."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class SkipCase(Exception):  # noqa: N818  # not an error: the case is skipped
    """The exception that skips a case that does not apply to this plugin or this machine."""


def expect(condition: bool, message: str) -> None:
    """Raise AssertionError with `message` unless `condition` is true."""
    if not condition:
        raise AssertionError(message)


def expect_error(kind: type[Exception], call: Callable[[], Any], rule: str) -> Exception:
    """Return the error of type `kind` that `call` raises.

    Otherwise raise AssertionError with `rule`.
    """
    try:
        result = call()
    except kind as error:
        return error
    except Exception as error:
        raise AssertionError(f"{rule}: expected {kind.__name__}, got {error!r}") from error
    raise AssertionError(f"{rule}: expected {kind.__name__}, but the call returned {result!r:.200}")


@contextmanager
def checking(what: str) -> Iterator[None]:
    """Convert errors of the block to an AssertionError.

    what: description of the check in the message.
    """
    try:
        yield
    except SkipCase:
        raise
    except Exception as error:
        text = str(error) if isinstance(error, AssertionError) else repr(error)
        raise AssertionError(f"{text}\nChecked: {what}") from error
