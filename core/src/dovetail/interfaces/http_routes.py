"""A sketch of the contract of HTTP routes: paths that a plugin adds to the server.

Version 0.x without an implementation: whoever writes the first one may still change it. The idea:
routes are data, so that the server can list, refuse and guard them before it serves any; they run
for every engine, so the user has to enable them. Depends on no web framework.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class HTTPRoutesContext:
    """All that routes are made from.

    served_model_name: what clients call the model. engine: the server's client of its engine.
    """

    served_model_name: str
    engine: Any
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPRequest:
    """What came in. headers: names in lower case. body: read whole, within the server's bounds."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPResponse:
    """What goes out. body: bytes, or pieces that are sent as they come."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | AsyncIterator[bytes] = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPRoute:
    """One path. public: served without the server's API key, which is never the default."""

    method: str
    path: str
    handler: Callable[[HTTPRequest], Awaitable[HTTPResponse]]
    public: bool = False


class HTTPRoutes(ABC):
    """Says which routes there are. A path that the server or another plugin has is refused."""

    CONTRACT: ClassVar[str] = "http_routes"
    CONTRACT_VERSION: ClassVar[str] = "0.2"

    @abstractmethod
    def __init__(self, context: HTTPRoutesContext) -> None:
        """Keep `context`; serve nothing yet."""

    @abstractmethod
    def routes(self) -> Sequence[HTTPRoute]:
        """Return the routes; asked once, at the start."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. May be called twice."""
