"""Overload, clients that disconnect or do not read, failures of the engine, and graceful shutdown.

The tests pause the engine, so that the moment of each event does not depend on the machine's speed.
"""

import http.client
import json
import os
import signal
import socket
import time
from contextlib import suppress

import pytest

from dovetail_devkit.harnesses.process_tree import children_of, num_threads_of, tcp_listeners_of

pytestmark = pytest.mark.costly  # the tests share servers

PROMPT = "Anna and Ben"
LONG = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
ADMIN = {"Authorization": "Bearer key-of-operators"}
OPTIONS = ("--model", "demo", "--max-model-len", "512", "--admin-key", "key-of-operators")
WAIT_S = 60


@pytest.fixture(scope="module")
def small(serving):
    """A server that accepts two requests, one of them running."""
    limits = ("--max-num-seqs", "1", "--max-waiting", "1", "--drain-timeout-s", "60")
    with serving(*OPTIONS, *limits, "--write-timeout-s", "1") as running:
        yield running.wait_until_ready()


def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not (actual := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return actual


def port_of(server):
    """Return the port on which the server listens, or 0 before it listens."""
    listeners = sorted(tcp_listeners_of(server.process.pid))
    return int(listeners[0].rpartition(":")[2], 16) if listeners else 0


def load_of(server):
    return server.get("/load").json["server_load"]


def pause(server):
    assert server.post("/pause", {}, **ADMIN).status == 200


def resume(server):
    assert server.post("/resume", {}, **ADMIN).status == 200


class Sent:
    """A request whose response is read later."""

    def __init__(self, server, body):
        self._response = None
        self._connection = http.client.HTTPConnection(server.host, server.port, timeout=WAIT_S)
        sent = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), sent)

    def read_start(self):
        """Wait for the first byte of the response."""
        self._response = self._connection.getresponse()
        return self._response.read(1)

    def leave(self):
        self._connection.close()
        if self._response is not None:
            self._response.close()

    def read(self):
        """Return the status and the rest of the response."""
        response = self._response or self._connection.getresponse()
        content = response.read()
        response.close()
        self._connection.close()
        return response.status, content


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_ends_when_its_client_disconnects(small, streamed):
    pause(small)
    sent = Sent(small, LONG | {"stream": streamed})
    wait_until(lambda: load_of(small) == 1)
    sent.leave()
    wait_until(lambda: load_of(small) == 0)
    resume(small)
    assert small.complete(prompt=PROMPT).status == 200
    wait_until(lambda: small.get("/load").json["num_running"] == 0)


def test_a_streamed_request_ends_when_its_client_disconnects(small):
    sent = Sent(small, LONG | {"stream": True})
    sent.read_start()
    sent.leave()
    wait_until(lambda: load_of(small) == 0)
    wait_until(lambda: small.get("/load").json["kv_cache_usage"] == 0)


def test_a_request_beyond_the_limit_is_rejected_before_its_body_is_read(small):
    pause(small)
    waiting = [Sent(small, LONG | {"max_tokens": 2}) for _ in range(2)]
    wait_until(lambda: load_of(small) == 2)
    for body in ({"prompt": PROMPT}, "not even JSON"):
        reply = small.post("/v1/completions", body)
        assert reply.status == 429 and reply.error["code"] == "queue_full"
        assert 1 <= int(reply.headers["retry-after"]) <= 60
    resume(small)
    assert [item.read()[0] for item in waiting] == [200, 200]
    assert small.complete(prompt=PROMPT).status == 200


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens"])
def test_requests_to_the_tokenizer_count_towards_the_limit(small, path):
    """Otherwise their bodies need unlimited memory while they wait for a thread."""
    messages = [{"role": "user", "content": PROMPT}]
    bodies = {"/tokenize": {"prompt": PROMPT}, "/detokenize": {"tokens": [5]}}
    body = bodies.get(path, {"model": "demo", "messages": messages})
    pause(small)
    waiting = [Sent(small, LONG | {"max_tokens": 2}) for _ in range(2)]
    wait_until(lambda: load_of(small) == 2)
    assert small.post(path, body).status == 429
    resume(small)
    assert [item.read()[0] for item in waiting] == [200, 200]
    assert small.post(path, body).status == 200


def test_completions_count_towards_the_limit(small):
    reply = small.complete(prompt=PROMPT, n=3)
    assert reply.status == 400 and reply.error["param"] == "n"
    pause(small)
    waiting = Sent(small, LONG | {"max_tokens": 2, "n": 2})
    wait_until(lambda: load_of(small) == 1)
    assert small.complete(prompt=PROMPT).status == 429
    resume(small)
    assert waiting.read()[0] == 200


def test_a_client_that_does_not_read_is_disconnected(small):
    # The first event has the log-probabilities of the prompt: more than all buffers can keep.
    fields = {"prompt": [9] * 500, "prompt_logprobs": 20, "n": 2, "stream": True}
    body = json.dumps(fields | {"max_tokens": 2}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    pause(small)  # otherwise a busy machine sees the load only after the end of the request
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        connection.settimeout(WAIT_S)
        connection.connect((small.host, small.port))
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        wait_until(lambda: load_of(small) == 1)
        resume(small)
        wait_until(lambda: load_of(small) == 0)
        received = b""
        # The kernel ignores the reset of a connection with a full buffer: no more data arrives.
        connection.settimeout(2)
        with suppress(ConnectionError, TimeoutError):
            while data := connection.recv(1 << 20):
                received += data
    assert b"[DONE]" not in received
    assert small.complete(prompt=PROMPT).status == 200


def engine_of(server):
    """Return the process id of the engine: the child of the server with sockets and threads."""
    return max(children_of(server.process.pid), key=num_threads_of)


def test_a_killed_engine_ends_its_requests_with_an_error_and_is_restarted(small):
    expected = small.complete(prompt=PROMPT).json["choices"][0]["text"]
    pause(small)
    sent = [Sent(small, LONG | {"stream": streamed}) for streamed in (False, True)]
    wait_until(lambda: load_of(small) == 2)
    os.kill(int(engine_of(small)), signal.SIGKILL)
    for item in sent:
        status, content = item.read()
        assert status == 503 and json.loads(content)["error"]["code"] == "engine_failed"
    wait_until(lambda: small.get("/ready").status == 200)
    resume(small)
    assert small.complete(prompt=PROMPT).json["choices"][0]["text"] == expected


def rejects_connections(server):
    try:
        server.connect().close()
    except ConnectionRefusedError:
        return True
    return False


def test_sigterm_lets_running_requests_finish_and_rejects_new_ones(small):
    pause(small)
    sent = Sent(small, LONG | {"stream": True, "max_tokens": 20})
    wait_until(lambda: load_of(small) == 1)
    quiet = small.connect()
    small.process.send_signal(signal.SIGTERM)
    wait_until(lambda: small.get("/ready").status == 503)
    assert small.get("/ready").json["status"] == "draining"
    assert small.get("/live").status == small.get("/health").status == 200
    reply = small.complete(prompt=PROMPT)
    assert reply.status == 503 and reply.error["code"] == "draining"
    assert int(reply.headers["retry-after"]) >= 1
    resume(small)
    status, content = sent.read()
    assert status == 200 and content.endswith(b"data: [DONE]\n\n")
    assert content.count(b"[DONE]") == 1 and b'"error"' not in content
    wait_until(lambda: rejects_connections(small))
    with quiet:  # a request on an older connection is still served
        quiet.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert quiet.recv(4096).startswith(b"HTTP/1.1 503")
    assert small.process.wait(WAIT_S) == 0


def test_a_server_that_is_still_loading_lists_its_model_and_rejects_requests(serving, monkeypatch):
    monkeypatch.setenv("DOVETAIL_FAULTS", "start.load_model:delay=600")
    with serving(*OPTIONS) as server:
        server.host, server.port = "127.0.0.1", wait_until(lambda: port_of(server))
        (model,) = server.get("/v1/models").json["data"]
        assert (model["id"], model["max_model_len"]) == ("demo", None)
        assert server.get("/v1/models/demo").json == model
        assert server.get("/live").status == 200
        for path in ("/ready", "/health"):
            assert server.get(path).json["status"] == "loading"
        assert server.get("/load").json["num_running"] == 0
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/embeddings"):
            reply = server.post(path, {"prompt": PROMPT})
            assert reply.status == 503 and reply.error["code"] == "loading", path
            assert int(reply.headers["retry-after"]) >= 1
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/ready").json["status"] == "draining")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT_S) == 1


def test_a_second_sigterm_ends_requests_with_an_error(serving):
    with serving(*OPTIONS, "--log-format", "json") as server:
        server.wait_until_ready()
        started = Sent(server, LONG | {"stream": True})
        first = started.read_start()
        pause(server)
        waiting = Sent(server, LONG)
        wait_until(lambda: server.get("/load").json["num_waiting"] == 1)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/ready").status == 503)
        server.process.send_signal(signal.SIGTERM)
        status, content = waiting.read()
        assert status == 503 and json.loads(content)["error"]["code"] == "shutting_down"
        events = [item for item in (first + started.read()[1]).decode().split("\n\n") if item]
        ends = [event for event in events if "[DONE]" in event or '"error"' in event]
        assert len(ends) == 1 and ends[0] == events[-1]
        assert server.process.wait(WAIT_S) == 1
    records = [json.loads(line) for line in server.lines if line is not None]
    assert all({"time", "level", "logger", "message"} <= record.keys() for record in records)
    assert any("Ready" in record["message"] for record in records)
