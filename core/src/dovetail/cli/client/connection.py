"""Requests to a server with the OpenAI API, with streamed responses.

The server is not trusted: lines and errors are bounded, and redirects are not followed.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dovetail.cli.terminal import read_text_file
from dovetail.errors import ConfigError, DovetailError, RequestError
from dovetail.value_checks import shorten

API_KEY_VARIABLE = "DOVETAIL_API_KEY"
"""Environment variable with the API key of the server."""

MAX_LINE_BYTES = 1 << 20
MAX_BODY_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 10.0
_MAX_KEY_BYTES = 4096
_POLL_S = 0.1
_MAX_LINES_AHEAD = 64
"""Number of lines that are received before the caller has read them."""
_DATA = b"data:"
_DONE = b"[DONE]"


@dataclass(frozen=True, kw_only=True)
class Server:
    """The address of a server. prefix: path before "/v1", or "". api_key: "" for none."""

    scheme: str
    host: str
    port: int | None
    prefix: str
    api_key: str

    @property
    def url(self) -> str:
        """The address of the server, without the API key."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.prefix}"

    def connect(self) -> http.client.HTTPConnection:
        """Return a new connection, which is not open yet."""
        if self.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                self.host, self.port, timeout=CONNECT_TIMEOUT_S, context=context
            )
        return http.client.HTTPConnection(self.host, self.port, timeout=CONNECT_TIMEOUT_S)


def read_server(url: str, api_key_file: Path | None) -> Server:
    """Return the server of `--url` and `--api-key-file`. Raise ConfigError for invalid values."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
        (parts.hostname or "").encode("idna")  # raises UnicodeError, as `connect` would
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise ConfigError(
            f"--url {shorten(url)} is not the address of a server, such as http://127.0.0.1:8000."
        )
    key = os.environ.get(API_KEY_VARIABLE, "")
    if api_key_file is not None:
        key = read_text_file("--api-key-file", api_key_file, max_bytes=_MAX_KEY_BYTES)
    key = key.strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError("The API key must be one word of printable ASCII characters.")
    return Server(
        scheme=parts.scheme,
        host=parts.hostname,
        port=port,
        prefix=parts.path.rstrip("/").removesuffix("/v1"),
        api_key=key,
    )


def first_model(server: Server) -> str:
    """Return the name of the first model that a server lists."""
    with _Request(server, "GET", "/v1/models", None) as response:
        listed = _parse(server, response.read(MAX_BODY_BYTES))
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise _not_api(server) from None


def stream(
    server: Server, path: str, body: Mapping[str, Any], *, interrupted: Callable[[], bool]
) -> Iterator[dict[str, Any]]:
    """Send a request with `stream`, and yield its events.

    interrupted: polled while the server sends nothing; True closes the connection.
    Raises RequestError if the server rejects the request, or ends the stream with an error.
    """
    request = _Request(server, "POST", path, {**body, "stream": True})
    lines: queue.Queue[bytes | Exception] = queue.Queue(_MAX_LINES_AHEAD)
    # A thread waits for the server, so that Ctrl-C also works while the server sends nothing.
    ended = threading.Event()
    threading.Thread(target=_pump, args=(request, lines, ended), daemon=True).start()
    try:
        while not interrupted():
            try:
                line = lines.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if isinstance(line, DovetailError):
                raise line
            if isinstance(line, Exception) or not line:
                raise RequestError(f"{server.url} closed the connection before the response ended.")
            if not line.startswith(_DATA):
                continue  # an empty line, or a comment that keeps the connection open
            content = line[len(_DATA) :].strip()
            if content == _DONE:
                return
            event = _parse(server, content)
            if "error" in event:
                raise RequestError(_message(event) or f"{server.url} reports an error.")
            yield event
    finally:
        ended.set()
        request.close()


def _pump(request: _Request, lines: queue.Queue[bytes | Exception], ended: threading.Event) -> None:
    """Put each line of the response into the queue, and at the end an empty line or the error."""
    try:
        with request as response:
            while (line := response.readline(MAX_LINE_BYTES)) and _put(lines, line, ended):
                pass
            _put(lines, b"", ended)
    except Exception as error:  # also what `http.client` raises after `close` in another thread
        _put(lines, error, ended)


def _put(
    lines: queue.Queue[bytes | Exception], item: bytes | Exception, ended: threading.Event
) -> bool:
    """Wait for room in the queue. Return False if the caller of `stream` has stopped reading."""
    while not ended.is_set():
        with suppress(queue.Full):
            lines.put(item, timeout=_POLL_S)
            return True
    return False


class _Request:
    """A context manager: sends a request, returns the response, closes the connection at exit."""

    def __init__(
        self, server: Server, method: str, path: str, body: Mapping[str, Any] | None
    ) -> None:
        self._server = server
        self._connection = server.connect()
        self._call = method, f"{server.prefix}{path}", body
        # `http.client` drops its reference to the socket if the server sends Connection: close.
        self._socket: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None

    def __enter__(self) -> http.client.HTTPResponse:
        server, (method, path, body) = self._server, self._call
        headers = {"Accept": "text/event-stream" if body else "application/json"}
        if server.api_key:
            headers["Authorization"] = f"Bearer {server.api_key}"
        content = None
        if body is not None:
            content, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        try:
            self._connection.connect()
            self._socket = self._connection.sock
            self._socket.settimeout(None)  # a model may think for a long time
            self._connection.request(method, path, content, headers)
            self._response = response = self._connection.getresponse()
            if response.status != http.client.OK:
                raise rejection(server, response.status, response.read(MAX_BODY_BYTES))
        except (OSError, http.client.HTTPException) as error:
            self.__exit__()
            raise _lost(server, error) from None
        except BaseException:
            self.__exit__()
            raise
        return response

    def __exit__(self, *_: object) -> None:
        self.close()
        if self._response is not None:
            self._response.close()

    def close(self) -> None:
        """Close the connection, and wake a thread that reads from it."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _lost(server: Server, error: BaseException) -> ConfigError:
    reason = str(getattr(error, "strerror", None) or error) or type(error).__name__
    shown = "".join(item if item.isprintable() else "?" for item in reason[:200])
    return ConfigError(
        f"The server {server.url} cannot be reached: {shown}.\n"
        "Check --url, or start a server: dovetail serve --model NAME"
    )


def rejection(server: Server, status: int, content: bytes) -> RequestError:
    """Return the error for a response with a status other than 200."""
    try:
        message = _message(json.loads(content))
    except (ValueError, RecursionError):
        message = ""
    advice = ""
    if status == http.client.UNAUTHORIZED:
        advice = f"\nPass the API key with --api-key-file, or set {API_KEY_VARIABLE}."
    return RequestError(f"{server.url} responded with {status}: {message or 'no message'}{advice}")


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    line = " ".join(str(text or "").split())[:500]
    return "".join(item if item.isprintable() else "?" for item in line)


def _parse(server: Server, content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _not_api(server)
    return value


def _not_api(server: Server) -> RequestError:
    return RequestError(f"{server.url} does not respond with the OpenAI API. Check --url.")
