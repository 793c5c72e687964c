"""A draft contract of HTTP routes: paths that a plugin adds to the server.

There is no implementation yet, and the first one may still change the contract. Routes are data, so
that the server can list, refuse and protect them before it serves them. They would run for every
engine, so the user must enable them. The contract does not depend on a web framework.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class HTTPRoutesContext:
    """Constructor arguments of an HTTP routes plugin.

    served_model_name: the model's name for clients. engine: the server's engine client.
    """

    served_model_name: str
    engine: Any
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPRequest:
    """An HTTP request. headers: lower-case names. body: complete, limited by the server."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPResponse:
    """An HTTP response. body: bytes, or an iterator of pieces to stream."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | AsyncIterator[bytes] = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPRoute:
    """A route. public: served without the server's API key."""

    method: str
    path: str
    handler: Callable[[HTTPRequest], Awaitable[HTTPResponse]]
    public: bool = False


class HTTPRoutes(ABC):
    """Provides routes. A path that the server or another plugin already serves is refused."""

    CONTRACT: ClassVar[str] = "http_routes"
    CONTRACT_VERSION: ClassVar[str] = "0.2"

    @abstractmethod
    def __init__(self, context: HTTPRoutesContext) -> None:
        """Store `context`. Do not serve yet."""

    @abstractmethod
    def routes(self) -> Sequence[HTTPRoute]:
        """Return the routes. Called once, at startup."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. May be called more than once."""
