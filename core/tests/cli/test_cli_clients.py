"""`dovetail complete` and `dovetail chat --url`, with a small fake server."""

from __future__ import annotations

import io
import json
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from dovetail.cli import main
from dovetail.cli.client.connection import read_server, stream


class FakeServer:
    """A server with responses that the test sets.

    lines: lines of the streamed response, or functions that return a line. status, body: those of
    an error response. requests: (method, path, headers, body) of each received request.
    """

    def __init__(self) -> None:
        self.lines: list[Any] = []
        self.status = 200
        self.body = b'{"error": {"message": "a message"}}'
        self.models: Any = {"data": [{"id": "first"}, {"id": "second"}]}
        self.requests: list[tuple[str, str, Any, Any]] = []
        self.url = ""


class Handler(BaseHTTPRequestHandler):
    fake: FakeServer

    def log_message(self, *given: Any) -> None:
        """Print no message about a request."""

    def do_GET(self) -> None:
        self.fake.requests.append(("GET", self.path, self.headers, None))
        self.send_all(200, json.dumps(self.fake.models).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.fake.requests.append(("POST", self.path, self.headers, body))
        if self.fake.status != 200:
            self.send_all(self.fake.status, self.fake.body)
            return
        self.send_response(200)
        self.end_headers()
        for line in self.fake.lines:
            self.wfile.write(line() if callable(line) else line)
            self.wfile.flush()

    def send_all(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback if a client closes its connection."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("DOVETAIL_API_KEY", raising=False)
    created = FakeServer()
    server = QuietServer(("127.0.0.1", 0), type("Bound", (Handler,), {"fake": created}))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    created.url = f"http://127.0.0.1:{server.server_port}"
    yield created
    server.shutdown()
    server.server_close()


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(piece: str) -> bytes:
    return event(choices=[{"index": 0, "text": piece}])


def delta(piece: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": piece}}])


DONE = b"data: [DONE]\n\n"


def test_a_completion_is_streamed(fake, capsys) -> None:
    fake.lines = [b": comment\n\n", text("one "), event(choices=[]), text("two"), DONE, text("no")]
    code = main(["complete", "a prompt", "--url", f"{fake.url}/v1/", "--temperature", "0.5"])
    assert (code, capsys.readouterr().out) == (0, "one two\n")
    (_, path, _, body) = fake.requests[-1]
    assert path == "/v1/completions"
    assert body == {
        "max_tokens": 64, "temperature": 0.5, "prompt": "a prompt", "model": "first",
        "stream": True,
    }  # fmt: skip


def test_the_api_key_comes_from_a_file_or_the_environment(
    fake, tmp_path, monkeypatch, capsys
) -> None:
    fake.lines = [DONE]
    (tmp_path / "key").write_text("secret-1\n")
    monkeypatch.setenv("DOVETAIL_API_KEY", "secret-2")
    main(["complete", "x", "--url", fake.url, "--model", "m"])
    main(["complete", "x", "--url", fake.url, "--model", "m", "--api-key-file", f"{tmp_path}/key"])
    keys = [headers["Authorization"] for _, _, headers, _ in fake.requests]
    assert keys == ["Bearer secret-2", "Bearer secret-1"]
    assert "secret" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (400, b'{"error": {"message": "temperature is wrong"}}', "400: temperature is wrong"),
        (401, b'{"error": {"message": "no key"}}', "--api-key-file"),
        (404, b"<html>", "404: no message"),
        (500, b'{"error": "\\u001b[31m' + b"x" * 5000 + b'"}', "500: ?[31mxxx"),
        (302, b"", "302: no message"),
    ],
)
def test_an_error_response_of_the_server_is_reported_in_at_most_three_lines(
    fake, capsys, status, body, expected
) -> None:
    fake.status, fake.body = status, body
    assert main(["complete", "x", "--url", fake.url]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.splitlines()) <= 3
    assert len(error) < 800


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([text("a")], "closed the connection before the response ended"),
        ([text("a"), event(error={"message": "the engine failed"})], "the engine failed"),
        ([b"data: [1]\n\n"], "does not respond with the OpenAI API"),
        ([b"data: {\n\n"], "does not respond with the OpenAI API"),
        ([b"data: " + b"[" * 100_000 + b"\n\n"], "does not respond with the OpenAI API"),
        ([b"data: " + b"x" * 3_000_000], "does not respond with the OpenAI API"),
    ],
)
def test_an_incomplete_or_invalid_stream_is_reported(fake, capsys, lines, expected) -> None:
    fake.lines = lines
    assert main(["complete", "x", "--url", fake.url]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:9", "cannot be reached: Connection refused."),
        ("ftp://host", "is not the address of a server"),
        ("http://", "is not the address of a server"),
        ("http://host:99999999", "is not the address of a server"),
        ("http://a..b", "is not the address of a server"),
        (f"http://{'x' * 64}", "is not the address of a server"),
        ("http://user:password@host", "is not the address of a server"),
    ],
)
def test_an_address_without_a_server_is_reported(capsys, url, expected) -> None:
    assert main(["complete", "x", "--url", url]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.splitlines()) <= 3


@pytest.mark.parametrize("models", [{}, {"data": []}, {"data": 7}, []])
def test_a_server_without_models_is_reported(fake, capsys, models) -> None:
    fake.models = models
    assert main(["complete", "x", "--url", fake.url]) == 2
    assert "OpenAI API" in capsys.readouterr().err


@pytest.mark.parametrize("when", ["before the first event", "after the first event"])
def test_an_interrupt_ends_the_stream(fake, capsys, when) -> None:
    waiting = threading.Event()

    def interrupt() -> bytes:
        signal.raise_signal(signal.SIGINT)
        waiting.wait(60)
        return DONE

    fake.lines = [interrupt] if when.startswith("before") else [text("one"), interrupt]
    assert main(["complete", "x", "--url", fake.url, "--model", "m"]) == 130
    waiting.set()
    output = capsys.readouterr()
    assert "(interrupted)" in output.err
    assert output.out in ("\n", "one\n")


def test_a_server_that_sends_faster_than_the_client_reads_is_slowed_down(fake) -> None:
    num_sent = 0

    def flood() -> bytes:
        nonlocal num_sent
        num_sent += 1
        return b": " + b"x" * 100_000 + b"\n"

    fake.lines = [text("one"), *[flood] * 1000]
    events = stream(read_server(fake.url, None), "/v1/completions", {}, interrupted=lambda: False)
    next(events)
    before = -1
    while num_sent != before:
        before = num_sent
        time.sleep(0.5)
    assert num_sent < 1000
    events.close()


def chat(monkeypatch: pytest.MonkeyPatch, typed: str, *options: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    return main(["chat", *options])


def test_a_chat_with_a_server_keeps_the_conversation(fake, monkeypatch, capsys) -> None:
    fake.lines = [delta("Hel"), delta("lo"), DONE]
    typed = "hi\n/params temperature=1.0\nagain\n/reset\nnew\n"
    assert chat(monkeypatch, typed, "--url", fake.url, "--system", "be kind", "--top-k", "5") == 0
    assert capsys.readouterr().out == "Hello\ntemperature          1.0\nHello\nHello\n"
    first, second, third = (body for method, *_, body in fake.requests if method == "POST")
    system = {"role": "system", "content": "be kind"}
    assert first == {
        "model": "first", "stream": True, "max_tokens": 512, "top_k": 5,
        "messages": [system, {"role": "user", "content": "hi"}],
    }  # fmt: skip
    assert second["temperature"] == 1.0
    assert second["messages"] == [
        system,
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "again"},
    ]
    assert third["messages"] == [system, {"role": "user", "content": "new"}]


def test_a_rejected_message_does_not_end_the_chat(fake, monkeypatch, capsys) -> None:
    fake.status = 400
    assert chat(monkeypatch, "one\ntwo\n", "--url", fake.url) == 0
    assert capsys.readouterr().err.count("400: a message") == 2
    bodies = [body["messages"] for method, *_, body in fake.requests if method == "POST"]
    assert [len(item) for item in bodies] == [1, 1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "--model NAME, or the address of a server with --url"),
        (["--url", "http://x", "--max-model-len", "5"], "--max-model-len has no effect with --url"),
        (["--url", "http://x", "--chat-template", "f"], "--chat-template has no effect"),
    ],
)
def test_contradictory_options_are_rejected(capsys, options, expected) -> None:
    assert main(["chat", *options]) == 2
    assert expected in capsys.readouterr().err
