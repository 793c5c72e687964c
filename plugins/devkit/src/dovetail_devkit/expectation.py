"""How a suite reports a violated rule: AssertionError, also if Python strips assertions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class NotHere(Exception):  # noqa: N818  # not an error: the case is skipped
    """A case does not apply to this plugin or this machine."""


def expect(condition: bool, message: str) -> None:
    """Raise AssertionError with `message` unless `condition` holds."""
    if not condition:
        raise AssertionError(message)


def expect_error(kind: type[Exception], call: Callable[[], Any], law: str) -> Exception:
    """Return the error of `kind` that `call` raises; raise AssertionError with `law` if none."""
    try:
        found = call()
    except kind as error:
        return error
    except Exception as error:
        raise AssertionError(f"{law}: expected {kind.__name__}, not {error!r}") from error
    raise AssertionError(f"{law}: expected {kind.__name__}, but it returned {found!r:.200}")


@contextmanager
def judging(what: str) -> Iterator[None]:
    """Turn errors raised inside into an AssertionError that names `what` was checked."""
    try:
        yield
    except NotHere:
        raise
    except Exception as error:
        told = str(error) if isinstance(error, AssertionError) else repr(error)
        raise AssertionError(f"{told}\n{what}") from error
