"""Errors of another process, sent as class name and text.

A DovetailError keeps its class; any other error becomes a DovetailError whose text names its
class. Only the classes of `dovetail.errors` are looked up.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail import errors
from dovetail.errors import DovetailError, EngineDeadError, RequestError, describe_failure

MAX_TEXT_CHARS = 1 << 15


@dataclass(frozen=True, slots=True)
class RemoteError:
    """An error in the form that is sent to another process.

    kind: the name of its class in `dovetail.errors`, "" for any other class. text: its message.
    detail: the parameter of a RequestError or the digest of an EngineDeadError.
    """

    kind: str
    text: str
    detail: str = ""

    @classmethod
    def of(cls, error: BaseException) -> RemoteError:
        """Return the error to send. Its phase is omitted, because the receiver knows it."""
        if not isinstance(error, DovetailError):
            return cls("", describe_failure(error))
        kind = next(
            item.__name__ for item in type(error).__mro__ if item.__module__ == errors.__name__
        )
        if isinstance(error, RequestError):
            return cls(kind, _text(error), error.parameter)
        if isinstance(error, EngineDeadError):
            return cls(kind, _text(error).removesuffix(f"\n{error.digest}"), error.digest)
        return cls(kind, _text(error))

    def error(self, owner: str = "") -> DovetailError:
        """Return an exception with this class and text. owner: a prefix for the text."""
        text = f"{owner}: {self.text}" if owner else self.text
        if self.kind == EngineDeadError.__name__:
            return EngineDeadError(text, digest=self.detail)
        if self.kind == RequestError.__name__:
            return RequestError(text, parameter=self.detail)
        error_cls = getattr(errors, self.kind, None)
        is_own = isinstance(error_cls, type) and issubclass(error_cls, DovetailError)
        return error_cls(text) if is_own else DovetailError(text)  # type: ignore[misc]


def _text(error: DovetailError) -> str:
    text = str(error).removesuffix(f" (startup phase: {error.phase})")
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}…"
