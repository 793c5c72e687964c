"""Listening sockets and TLS. Errors name the option."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from dovetail.errors import ConfigError
from dovetail.value_checks import shorten
from dovetail_server.settings import KIB, ServerSettings

if TYPE_CHECKING:
    import ssl

BACKLOG = 2048
SEND_BUFFER_BYTES = 128 * KIB
"""Size of a connection's send buffer in the kernel; Linux allows twice as much."""


def listen(host: str, port: int, *, option: str = "--port") -> socket.socket:
    """Return a listening socket. Raise ConfigError if the address cannot be used.

    option: the option that sets the port, for errors.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # a name that is not valid raises UnicodeError
        reason = error.strerror if isinstance(error, OSError) else "it is not a valid host name"
        raise ConfigError(f"--host {shorten(host)} cannot be used: {reason}.") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Port {port} on {host} cannot be used: {error.strerror}.\n"
            f"Choose another one with {option}, or {option} 0 for a free one."
        ) from None
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the address of a listening socket as "host:port"."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """Return the TLS settings of a server, or None. Raise ConfigError for an unusable file."""
    if settings.ssl_certfile is None:
        return None
    import ssl  # slow to import

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    key = settings.ssl_keyfile or settings.ssl_certfile
    for option, file in (("--ssl-certfile", settings.ssl_certfile), ("--ssl-keyfile", key)):
        _check_readable(option, file)
    try:
        context.load_cert_chain(settings.ssl_certfile, key, password=_reject_password)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--ssl-certfile {settings.ssl_certfile} and the key in {key} (--ssl-keyfile) cannot "
            f"be used: {_reason(error)}.\nBoth must be PEM files, and the key must belong to the "
            "certificate."
        ) from None
    if settings.ssl_ca_certs is not None:
        _check_readable("--ssl-ca-certs", settings.ssl_ca_certs)
        try:
            context.load_verify_locations(settings.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"--ssl-ca-certs {settings.ssl_ca_certs} cannot be used: {_reason(error)}."
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_readable(option: str, file: str) -> None:
    """Raise ConfigError, naming the option and the file, if the file cannot be read."""
    try:
        with open(file, "rb"):
            return
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{option} {file} cannot be read: {reason}.") from None


def _reject_password() -> str:
    """Reject a key with a password, for which OpenSSL would otherwise prompt in the terminal."""
    raise ConfigError(
        "--ssl-keyfile has a password; use a key without one, readable only by the server."
    )


def _reason(error: OSError) -> str:
    """Return OpenSSL's reason in words, such as "key values mismatch"."""
    is_openssl = hasattr(error, "library")  # its `strerror` names a line of C
    reason = error.reason if is_openssl else error.strerror
    return str(reason).lower().replace("_", " ") if reason else "not a PEM file"
