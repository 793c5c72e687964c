"""Starts real servers on free loopback ports, and sends requests to them."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from dovetail import LLM

START_S = 60
ANSWER_S = 60
READY = re.compile(r"https?://(\S+?):(\d+)/v1")
BLOCKED = "blocked the event loop"
_servers = []
"""All servers that are running."""


class Reply:
    def __init__(self, status, headers, content):
        self.status, self.headers, self.content = status, headers, content

    @property
    def json(self):
        return json.loads(self.content)

    @property
    def error(self):
        return self.json["error"]

    @property
    def events(self):
        """Return the payloads of server-sent events. The end of the stream is the text "[DONE]"."""
        decoded = [part for part in self.content.decode().split("\n\n") if part]
        assert all(part.startswith("data: ") for part in decoded), decoded
        payloads = [part.removeprefix("data: ") for part in decoded]
        return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


class RunningServer:
    """A server process. lines: the lines that it has written to stderr."""

    def __init__(self, *options):
        main = "import sys; from dovetail.cli.app import main; sys.exit(main())"
        command = [sys.executable, "-W", "error", "-c", main, "serve", "--port", "0", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines = []
        self._is_traced = "--trace-functions" in options
        self._num_checked = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        with self.process.stderr:
            for line in self.process.stderr:
                with self._changed:
                    self.lines.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self.lines.append(None)
            self._changed.notify_all()

    def wait_for(self, pattern):
        """Wait for a line of the log that matches. Return the match."""
        compiled = re.compile(pattern)

        def found():
            matches = (compiled.search(line) for line in self.lines if line is not None)
            return next((match for match in matches if match), None) or (
                self.lines and self.lines[-1] is None
            )

        with self._changed:
            match = self._changed.wait_for(found, START_S)
        assert isinstance(match, re.Match), (pattern, self.lines)
        return match

    def wait_until_ready(self):
        self.host, port = self.wait_for(READY.pattern).groups()
        self.port = int(port)
        return self

    def send(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection(self.host, self.port, timeout=ANSWER_S)
        try:
            content, more = body, {"Connection": "close"}
            if body is not None and not isinstance(body, (bytes, str)):
                content, more["Content-Type"] = json.dumps(body), "application/json"
            connection.request(method, path, content, more | (headers or {}))
            response = connection.getresponse()
            return Reply(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def check_loop(self, note=""):
        """Check that no callback has blocked an event loop of the server since the last check.

        A server that records its function calls is not checked, because this slows down each call.
        """
        if self._is_traced:
            return
        lines = self.lines[self._num_checked :]
        self._num_checked += len(lines)
        assert not [line for line in lines if line and BLOCKED in line], note

    def get(self, path, **headers):
        return self.send("GET", path, headers=headers)

    def post(self, path, body, **headers):
        return self.send("POST", path, body, headers)

    def complete(self, **body):
        return self.post("/v1/completions", {"temperature": 0, "max_tokens": 8} | body)

    def chat(self, text="reverse: robot, bank, window", **body):
        messages = [{"role": "user", "content": text}]
        kwargs = {"messages": messages, "temperature": 0, "max_tokens": 8} | body
        return self.post("/v1/chat/completions", kwargs)

    def connect(self):
        return socket.create_connection((self.host, self.port), timeout=ANSWER_S)

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(START_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@contextmanager
def run_server(*options):
    """Start a server, and stop it at the end."""
    server = RunningServer(*options)
    _servers.append(server)
    try:
        yield server
    finally:
        _servers.remove(server)
        server.stop()
    server.check_loop()


@pytest.fixture(autouse=True)
def check_event_loops():
    """Check that a test has blocked no event loop of a running server."""
    yield
    for server in _servers:
        server.check_loop()


@pytest.fixture(scope="session")
def serving():
    """Return the context manager that runs a server with command-line options."""
    return run_server


@pytest.fixture(scope="session")
def server():
    """A server with the demo model, for all tests that do not stop it."""
    with run_server(
        "--model", "demo", "--max-model-len", "512", "--http-routes", "props"
    ) as running:
        yield running.wait_until_ready()


@pytest.fixture(scope="session")
def offline():
    """An engine with the same model, without a server."""
    with LLM("demo", max_model_len=512) as llm:
        yield llm
