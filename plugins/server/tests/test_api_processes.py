"""Several API processes serve requests for one engine (`--api-processes`)."""

import http.client
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dovetail_devkit.rigs.process_tree import children_of

OPERATOR = {"Authorization": "Bearer key-of-operators"}
OPTIONS = ("--model", "demo", "--max-model-len", "512", "--admin-key", "key-of-operators")
BODY = {"prompt": "Anna and Ben", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
ENTRY = "dovetail_server.processes.api_process:main"
NUM_PROCESSES = 2
WAIT_S = 60


@pytest.fixture(scope="module")
def shared(serving):
    """A server with two API processes and a plugin with a route."""
    more = ("--api-processes", str(NUM_PROCESSES), "--http-routes", "props")
    with serving(*OPTIONS, *more, "--drain-timeout-s", "60") as running:
        yield running.wait_until_ready()


def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def api_processes(server):
    return {pid for pid in children_of(server.process.pid) if ENTRY in command_of(pid)}


def engine_of(server):
    """Return the process id of the engine: the child with the most threads but the API ones."""
    others = children_of(server.process.pid) - api_processes(server)
    return max(others, key=lambda pid: len(list(Path(f"/proc/{pid}/task").iterdir())))


def sockets_of(pid):
    links = (os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir())
    return {link[8:-1] for link in links if link.startswith("socket:[")}


class Held:
    """A streamed request. port: of the client's end."""

    def __init__(self, server):
        self.connection = http.client.HTTPConnection(server.host, server.port, timeout=WAIT_S)
        headers = {"Content-Type": "application/json"}
        body = json.dumps(BODY | {"stream": True})
        self.connection.request("POST", "/v1/completions", body, headers)
        self.port = self.connection.sock.getsockname()[1]

    def server_of(self, server):
        """Return the API process that has accepted the connection; None before."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        wanted = (f":{server.port:04X}", f":{self.port:04X}")
        sockets = {row[9] for row in rows if (row[1][8:], row[2][8:]) == wanted}
        return next((pid for pid in api_processes(server) if sockets & sockets_of(pid)), None)

    def read(self):
        """Return the content of the answer; b"" for a connection that broke."""
        try:
            return self.connection.getresponse().read()
        except (ConnectionError, http.client.HTTPException):
            return b""
        finally:
            self.connection.close()


def pause(server):
    assert server.post("/pause", {}, **OPERATOR).status == 200


def resume(server):
    assert server.post("/resume", {}, **OPERATOR).status == 200


def test_all_processes_answer_alike(shared):
    assert len(api_processes(shared)) == NUM_PROCESSES
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: shared.complete(prompt="Anna"), range(32)))
    assert {one.status for one in replies} == {200}
    assert len({one.json["choices"][0]["text"] for one in replies}) == 1
    assert {shared.get("/props").status for _ in range(8)} == {200}


def test_every_process_shows_the_metrics_of_all(shared):
    def counted():
        text = shared.get("/metrics").content.decode()
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    def tokens():
        return sum(v for k, v in counted().items() if k.startswith("dovetail_generation_tokens"))

    before = tokens()
    for _ in range(8):  # both processes serve some of them
        shared.complete(prompt="one", max_tokens=3, ignore_eos=True)
    # A process counts a request just after its answer, perhaps when another one is asked.
    wait_until(lambda: tokens() == before + 24)
    assert {tokens() for _ in range(8)} == {before + 24}


def test_a_killed_process_takes_only_its_own_requests_and_is_restarted(shared):
    pause(shared)
    held = [Held(shared) for _ in range(12)]
    owners = [wait_until(lambda one=one: one.server_of(shared)) for one in held]
    before = api_processes(shared)
    killed = owners[0]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: killed not in api_processes(shared))
    resume(shared)
    contents = [one.read() for one in held]
    for owner, content in zip(owners, contents, strict=True):
        assert content.endswith(b"data: [DONE]\n\n") == (owner != killed)
    after = wait_until(lambda: len(found := api_processes(shared)) == NUM_PROCESSES and found)
    assert killed not in after and before - {killed} < after
    shared.wait_for("API process . ended by SIGKILL")
    assert wait_until(lambda: shared.get("/load").json["kv_cache_usage"] == 0)


def test_the_processes_follow_an_engine_that_is_restarted(shared):
    expected = shared.complete(prompt="Anna").json["choices"][0]["text"]
    wait_until(lambda: all(shared.get("/ready").status == 200 for _ in range(20)))
    before = api_processes(shared)
    pause(shared)
    held = [Held(shared) for _ in range(6)]
    for one in held:
        wait_until(lambda one=one: one.server_of(shared))
    wait_until(lambda: shared.get("/load").json["num_waiting"] >= 6)
    os.kill(engine_of(shared), signal.SIGKILL)
    for one in held:
        assert json.loads(one.read())["error"]["code"] == "engine_failed"
    wait_until(lambda: all(shared.get("/ready").status == 200 for _ in range(20)))
    resume(shared)  # the next engine is paused, too
    wait_until(lambda: all(shared.complete(prompt="Anna").status == 200 for _ in range(20)))
    assert shared.complete(prompt="Anna").json["choices"][0]["text"] == expected
    assert shared.get("/props").status == 200
    assert api_processes(shared) == before


def test_sigterm_drains_all_processes(shared):
    pause(shared)
    held = [Held(shared) for _ in range(12)]
    for one in held:
        wait_until(lambda one=one: one.server_of(shared))
    wait_until(lambda: shared.get("/load").json["num_waiting"] >= 12)
    shared.process.send_signal(signal.SIGTERM)
    wait_until(lambda: shared.get("/ready").status == 503)
    resume(shared)
    for one in held:
        content = one.read()
        assert content.endswith(b"data: [DONE]\n\n") and b'"error"' not in content
    assert shared.process.wait(WAIT_S) == 0


@pytest.mark.parametrize("count", ["1", "2"])
@pytest.mark.parametrize(
    ("option", "value"), [("--http-routes", "absent"), ("--kv-cache-memory-bytes", "1")]
)
def test_a_start_that_fails_ends_the_server_with_the_reason(serving, count, option, value):
    options = ("--model", "demo", "--max-model-len", "512", "--api-processes", count)
    with serving(*options, option, value) as server:
        assert server.process.wait(WAIT_S) != 0
    named = value if value == "absent" else "kv_cache_memory_bytes"
    assert any(named in line for line in server.lines if line is not None)
