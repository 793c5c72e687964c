"""Decides whether to serve a request, based on its host, its API key and the web page's origin."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping

from dovetail_server.protocol.errors import APIError
from dovetail_server.routes.table import Access
from dovetail_server.settings import ServerSettings
from dovetail_server.transport.exchange import Exchange
from dovetail_server.transport.keys import KeyRing

LOCAL_NAMES = ("localhost",)
_CORS_HEADERS = (
    b"authorization, content-type, x-request-id, x-request-timeout, x-api-key, anthropic-version"
)


class Guard:
    """Checks requests before their routes run. keys: client keys.

    admin_keys: keys for admin routes.
    """

    def __init__(self, settings: ServerSettings, keys: KeyRing, admin_keys: KeyRing) -> None:
        self._keys = keys
        self._admin_keys = admin_keys
        self._origins = frozenset(settings.cors_origins)
        self._hosts = _allowed_hosts(settings, keys)

    def check(self, exchange: Exchange, access: Access) -> None:
        """Raise APIError if a request must not be served. Set its `caller`."""
        if self._hosts is not None and not _is_allowed(exchange.headers, self._hosts):
            raise APIError(
                "The host of the request is not allowed (--allowed-host).",
                status=403,
                code="host_not_allowed",
            )
        self._allow_origin(exchange)
        if access is Access.PUBLIC:
            return
        ring = self._admin_keys if access is Access.ADMIN else self._keys
        if not ring:
            return
        exchange.caller = ring.identify(exchange.headers)
        if not exchange.caller:
            exchange.extra_headers.append((b"www-authenticate", b"Bearer"))
            raise APIError(
                "The API key is missing or wrong; send it as `Authorization: Bearer KEY`.",
                status=401,
                code="invalid_api_key",
            )

    def is_preflight(self, exchange: Exchange) -> bool:
        """Whether a browser requests permission to send a request."""
        asks = "access-control-request-method" in exchange.headers
        return bool(self._origins) and exchange.method == "OPTIONS" and asks

    async def respond_to_preflight(self, exchange: Exchange) -> None:
        """Respond to a browser that requests permission."""
        self._allow_origin(exchange)
        headers = [
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-allow-headers", _CORS_HEADERS),
            (b"access-control-max-age", b"600"),
        ]
        await exchange.respond_raw(204, headers, b"")

    def _allow_origin(self, exchange: Exchange) -> None:
        origin = exchange.headers.get("origin")
        if self._origins and origin is not None and (origin in self._origins):
            exchange.extra_headers += [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"vary", b"origin"),
            ]


def _allowed_hosts(settings: ServerSettings, keys: KeyRing) -> frozenset[str] | None:
    """Return the names in the header "host" that are accepted, or None for all.

    Without keys, a server on the loopback interface accepts only local names: a web page could
    otherwise reach it through a name that resolves to this machine.
    """
    if settings.allowed_hosts:
        return frozenset(name.lower() for name in settings.allowed_hosts)
    return None if keys or not is_loopback(settings.host) else frozenset(LOCAL_NAMES)


def is_loopback(host: str) -> bool:
    """Whether an address can be reached only from this machine."""
    if host.lower() in LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_allowed(headers: Mapping[str, str], names: Collection[str]) -> bool:
    host = headers.get("host", "")
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.strip("[]").lower()
    if name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True  # a name that resolves to this machine is not an address
