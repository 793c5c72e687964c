"""Clients that disconnect or read slowly, overload, shutdown and killed processes under load."""

import http.client
import json
import os
import random
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from dovetail_devkit.harnesses.process_tree import children_of, num_threads_of

PROMPT = "Anna and Ben"
LONG = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
OPTIONS = ("--model", "demo", "--max-model-len", "512")
CANARY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
WAIT_S = 60
NUM_DISCONNECTS, NUM_ALL_DISCONNECTS = 150, 10_000
NUM_DRAINS = 60  # in four cases, which run at the same time
NUM_STREAMS = 12
NUM_SLOW, NUM_MEASURED = 200, 8
NUM_RUNNING, OVERLOAD, OVERLOAD_S = 16, 10, 15
RESET = struct.pack("ii", 1, 0)
REFUSED = -1  # instead of a status: the server no longer accepted connections


def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not (actual := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return actual


def is_idle(server):
    load = server.get("/load").json
    return load["server_load"] == load["num_running"] == load["kv_cache_usage"] == 0


def request_bytes(body):
    content = json.dumps(body).encode()
    lines = ("POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    head = "\r\n".join((*lines, f"Content-Length: {len(content)}", "", ""))
    return head.encode() + content


def leave(server, seed):
    """Send a request, or a part of it, and close the connection at a random moment."""
    chance = random.Random(seed)
    body = LONG | {"stream": chance.random() < 0.6, "n": chance.choice((1, 1, 3))}
    data = request_bytes(body)
    if chance.random() < 0.1:
        data = data[: chance.randrange(len(data))]
    with server.connect() as connection, suppress(ConnectionError, TimeoutError):
        connection.sendall(data)
        if chance.random() < 0.5:
            connection.settimeout(chance.random() * 0.05)
            connection.recv(chance.choice((1, 1000)))
        if chance.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def disconnect(server, count):
    expected = server.complete(**CANARY).json["choices"]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda seed: leave(server, seed), range(count)))
    start_s = time.monotonic()
    wait_until(lambda: is_idle(server))
    took_s = time.monotonic() - start_s
    assert server.complete(**CANARY).json["choices"] == expected
    return took_s


def test_all_blocks_are_freed_when_clients_disconnect_at_random_moments(server):
    disconnect(server, NUM_DISCONNECTS)


@pytest.mark.clock
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_blocks_are_free_within_a_second_after_ten_thousand_clients_disconnect(server, note):
    took_s = disconnect(server, NUM_ALL_DISCONNECTS)
    note(f"{NUM_ALL_DISCONNECTS} disconnects: all blocks free after {took_s:.2f} s")
    assert took_s <= 1


class Stream:
    """A streamed request, which a thread reads to its end. content: the received bytes."""

    def __init__(self, server, **fields):
        self.content, self.status, self.end_s = b"", 0, 0.0
        self.started = threading.Event()
        self._server, self._body = server, json.dumps(LONG | {"stream": True} | fields)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        server = self._server
        connection = http.client.HTTPConnection(server.host, server.port, timeout=WAIT_S)
        headers = {"Content-Type": "application/json"}
        try:
            connection.request("POST", "/v1/completions", self._body, headers)
            response = connection.getresponse()
            self.status = response.status
            while data := response.read1():
                self.content += data
                self.started.set()
        except ConnectionRefusedError:
            self.status = REFUSED
        except (ConnectionError, http.client.HTTPException) as error:
            self.content += repr(error).encode()
        finally:
            self.end_s = time.monotonic()
            self.started.set()
            connection.close()

    def check_end(self, *codes):
        """Check that the response has exactly one end, which is the last event."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        if self.status == REFUSED:
            assert "draining" in codes
            return
        if self.status != 200:
            assert json.loads(self.content)["error"]["code"] in codes, self.content
            return
        events = [item for item in self.content.decode().split("\n\n") if item]
        ends = [event for event in events if event == "data: [DONE]" or '"error"' in event]
        assert len(ends) == 1 and ends[0] == events[-1], events[-3:]
        assert ends[0] == "data: [DONE]" or any(f'"{code}"' in ends[0] for code in codes), ends


def drain(serving, chance, num_streams):
    """Stop a server while streams run. Check that every stream ends with one event."""
    forced = chance.random() < 0.5
    with serving(*OPTIONS) as server:
        server.wait_until_ready()
        sizes = [chance.choice((2, 10, 40)) for _ in range(num_streams)]
        streams = [Stream(server, max_tokens=size) for size in sizes]
        assert all(
            stream.started.wait(WAIT_S) for stream in streams[: chance.randrange(num_streams)]
        )
        server.process.send_signal(signal.SIGTERM)
        if forced:
            server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(WAIT_S)
    assert code in (0, 1)
    for stream in streams:
        stream.check_end("draining", "shutting_down")


def test_a_drain_ends_every_stream_with_one_event(serving):
    drain(serving, random.Random(0), 4)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
def test_many_drains_end_every_stream_with_one_event(serving, seed):
    chance = random.Random(seed)
    for _ in range(NUM_DRAINS // 4):
        drain(serving, chance, NUM_STREAMS)


def engine_of(server):
    """Return the process id of the engine: the child of the server with the most threads."""
    return max(children_of(server.process.pid), key=num_threads_of)


@pytest.mark.soak
@pytest.mark.clock
@pytest.mark.parametrize("victim", ["engine", "worker"])
def test_a_killed_process_ends_the_running_streams_and_is_replaced(serving, victim, note):
    more = ("--executor-backend", "multiproc") if victim == "worker" else ()
    with serving(*OPTIONS, *more) as server:
        server.wait_until_ready()
        expected = server.complete(**CANARY).json["choices"]
        for _ in range(3):
            streams = [Stream(server, n=2) for _ in range(NUM_STREAMS)]
            assert all(stream.started.wait(WAIT_S) for stream in streams)
            pid = engine_of(server)
            pid = pid if victim == "engine" else min(children_of(pid))
            start_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            for stream in streams:
                stream.check_end("engine_failed")
            ended_s = max(stream.end_s for stream in streams) - start_s
            wait_until(lambda: server.get("/ready").status == 200)
            ready_s = time.monotonic() - start_s
            note(f"killed {victim}: last error after {ended_s:.2f} s, ready after {ready_s:.2f} s")
            assert ended_s < 2 and ready_s < 10
            assert server.complete(**CANARY).json["choices"] == expected
        wait_until(lambda: is_idle(server))
        processes = children_of(server.process.pid)
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)


READERS = """
import selectors, socket, sys, time
host, port, count, slow, data = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
chosen = selectors.DefaultSelector()
for _ in range(count):
    one = socket.socket()
    if slow == "slow":
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.connect((host, port))
    one.sendall(bytes.fromhex(data))
    chosen.register(one, selectors.EVENT_READ)
print("sent", flush=True)
while True:
    ready = chosen.select()
    for key, _ in ready:
        if slow == "slow":
            key.fileobj.recv(1)
        elif not key.fileobj.recv(1 << 16):
            chosen.unregister(key.fileobj)
    if slow == "slow":
        time.sleep(1)
"""


def gaps_with(server, kind):
    """Return the times between stream events while `NUM_SLOW` readers of a kind are connected."""
    data = request_bytes(LONG | {"stream": True, "logprobs": 5}).hex()
    command = [sys.executable, "-c", READERS, server.host, str(server.port), str(NUM_SLOW)]
    gaps = []

    def measure():
        with server.connect() as connection:
            connection.sendall(request_bytes(LONG | {"stream": True, "max_tokens": 200}))
            last_s, tail = None, b""
            while b"[DONE]" not in tail:
                tail = (tail + connection.recv(1 << 16))[-100:]
                now_s = time.monotonic()
                if last_s is not None:
                    gaps.append(now_s - last_s)
                last_s = now_s

    with subprocess.Popen([*command, kind, data], stdout=subprocess.PIPE) as readers:
        try:
            assert readers.stdout.readline() == b"sent\n"
            with ThreadPoolExecutor(NUM_MEASURED) as pool:
                list(pool.map(lambda _: measure(), range(NUM_MEASURED)))
        finally:
            readers.kill()
    wait_until(lambda: is_idle(server))
    return gaps


@pytest.mark.soak
@pytest.mark.clock
@pytest.mark.timeout(1800)
def test_slow_readers_do_not_delay_other_streams(server, note):
    def p99(kind):
        return statistics.quantiles(gaps_with(server, kind), n=100)[-1]

    pairs = [(p99("slow"), p99("fast")) for _ in range(3)]
    ratio = statistics.median(slow / fast for slow, fast in pairs)
    note(f"p99 of gaps with {NUM_SLOW} slow readers: {ratio:.2f} of that with fast readers")
    assert ratio <= 1.2


def rss_of(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def completions_per_second(server, num_clients):
    """Return the completions per second of closed-loop clients, and the times of rejections."""
    end_s, times, finished = time.monotonic() + OVERLOAD_S, [], []

    def run(_):
        while time.monotonic() < end_s:
            start_s = time.monotonic()
            reply = server.complete(prompt=PROMPT, max_tokens=64, ignore_eos=True)
            now_s = time.monotonic()
            if reply.status == 200:
                finished.append(now_s)
            else:
                assert reply.status == 429
                times.append(now_s - start_s)
                time.sleep(float(reply.headers["retry-after"]))

    with ThreadPoolExecutor(num_clients) as pool:
        list(pool.map(run, range(num_clients)))
    return sum(item <= end_s for item in finished) / OVERLOAD_S, times


@pytest.mark.soak
@pytest.mark.clock
@pytest.mark.timeout(1800)
def test_an_overloaded_server_keeps_its_throughput_and_rejects_requests_immediately(serving, note):
    limits = ("--max-num-seqs", str(NUM_RUNNING), "--max-waiting", str(NUM_RUNNING))
    with serving(*OPTIONS, *limits) as server:
        server.wait_until_ready()
        processes = [server.process.pid, *children_of(server.process.pid)]
        rounds, memory = [], []
        for _ in range(4):
            peak, _ = completions_per_second(server, 2 * NUM_RUNNING)
            actual, refusals = completions_per_second(server, OVERLOAD * NUM_RUNNING)
            rounds.append((actual / peak, statistics.quantiles(refusals, n=20)[-1]))
            memory.append(sum(map(rss_of, processes)))
        ratio = statistics.median(item for item, _ in rounds[1:])
        rejected_s = statistics.median(item for _, item in rounds[1:])
        growth = memory[-1] / memory[0] - 1
        note(
            f"overload: {ratio:.2f} of the peak; p95 of rejections {1000 * rejected_s:.0f} ms; "
            f"memory {100 * growth:+.1f} %"
        )
        assert ratio >= 0.95 and rejected_s <= 0.05 and growth <= 0.03
