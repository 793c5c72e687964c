"""The contract of HTTP routes: paths that a plugin adds to the server.

Routes are data, so that the server can list, check and protect them before it serves them. An
installed plugin adds its routes only if the user enables it (`dovetail serve --http-routes NAME`).
The contract does not depend on a web framework.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class HTTPRoutesContext:
    """Constructor arguments of an HTTP routes plugin.

    served_model_name: the model's name for clients. engine: the server's `AsyncLLM`, which is
    ready. options: the user's options from `plugin_options`.
    """

    served_model_name: str
    engine: Any
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPRequest:
    """An HTTP request.

    query: the first value of each name. headers: lower-case names, without the API key. body:
    complete; the server limits its size.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPResponse:
    """An HTTP response. body: bytes, or an iterator of pieces to stream.

    headers: such as "content-type"; the server adds length, date and request id.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | AsyncIterator[bytes] = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPRoute:
    """A route. public: whether clients may use it without the server's API key.

    method: GET, POST, PUT, PATCH or DELETE. path: begins with "/" and is matched exactly. handler:
    runs in the server's event loop, so it must not block; it is cancelled if the client
    disconnects.
    """

    method: str
    path: str
    handler: Callable[[HTTPRequest], Awaitable[HTTPResponse]]
    public: bool = False


class HTTPRoutes(ABC):
    """Provides routes. A path that the server or another plugin already serves is rejected.

    Contract: A handler raises RequestError for an invalid request, which becomes a response with
    the status 400 that names the parameter; other DovetailErrors get the status of their class. Any
    other exception becomes the status 500 and affects no other request.
    """

    CONTRACT: ClassVar[str] = "http_routes"
    CONTRACT_VERSION: ClassVar[str] = "0.2"

    @abstractmethod
    def __init__(self, context: HTTPRoutesContext) -> None:
        """Keep `context`. Do not serve yet."""

    @abstractmethod
    def routes(self) -> Sequence[HTTPRoute]:
        """Return the routes. Called once, at startup."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. May be called more than once."""
