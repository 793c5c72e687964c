"""Several API processes serve requests for one engine (`--api-processes`)."""

import http.client
import itertools
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from dovetail_devkit.harnesses.process_tree import (
    children_of,
    is_running,
    num_threads_of,
    open_files_of,
)

pytestmark = pytest.mark.costly  # the tests share servers

OPERATOR = {"Authorization": "Bearer key-of-operators"}
OPTIONS = ("--model", "demo", "--max-model-len", "512", "--admin-key", "key-of-operators")
BODY = {"prompt": "Anna and Ben", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
ENTRY = "dovetail_server.processes.api_process:main"
NUM_PROCESSES = 2
WAIT_S = 60
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def shared(serving):
    """A server with two API processes and a plugin with a route."""
    more = ("--api-processes", str(NUM_PROCESSES), "--http-routes", "props")
    with serving(*OPTIONS, *more, "--drain-timeout-s", "60") as running:
        yield running.wait_until_ready()


def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not (actual := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return actual


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def api_processes(server):
    return {pid for pid in children_of(server.process.pid) if ENTRY in command_of(pid)}


def engine_of(server):
    """Return the process id of the engine: the non-API child with the most threads."""
    others = children_of(server.process.pid) - api_processes(server)
    return max(others, key=num_threads_of)


class OpenStream:
    """A streamed request. port: the local port of the client.

    request_id: the id of its response.
    """

    def __init__(self, server, **fields):
        self.request_id = f"held-{next(NUMBERS)}"
        self.connection = http.client.HTTPConnection(server.host, server.port, timeout=WAIT_S)
        headers = {"Content-Type": "application/json", "X-Request-Id": self.request_id}
        body = json.dumps(BODY | {"stream": True} | fields)
        self.connection.request("POST", "/v1/completions", body, headers)
        self.port = self.connection.sock.getsockname()[1]

    def server_of(self, server):
        """Return the API process that has accepted the connection, or None if none has yet."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        expected = (f":{server.port:04X}", f":{self.port:04X}")
        sockets = {f"socket:[{row[9]}]" for row in rows if (row[1][8:], row[2][8:]) == expected}
        return next(
            (pid for pid in api_processes(server) if sockets & set(open_files_of(pid))), None
        )

    def read(self):
        """Return the content of the response, or b"" if the connection was closed early."""
        try:
            return self.connection.getresponse().read()
        except (ConnectionError, http.client.HTTPException):
            return b""
        finally:
            self.connection.close()


def held_by_all(server):
    """Send streamed requests until each process has some. Return them."""
    held, owners = [], set()
    while len(held) < 8 or len(owners) < NUM_PROCESSES:
        assert len(held) < 100
        held.append(OpenStream(server))
        owners.add(wait_until(lambda: held[-1].server_of(server)))
    return held


def wait_until_all_serve(server):
    """Send requests until every process has served one of them."""
    answered = set()

    def ask():
        first = OpenStream(server)
        answered.add(wait_until(lambda: first.server_of(server)))
        return first.read() and len(answered & api_processes(server)) == NUM_PROCESSES

    wait_until(ask)


def pause(server):
    assert server.post("/pause", {}, **OPERATOR).status == 200


def resume(server):
    assert server.post("/resume", {}, **OPERATOR).status == 200


def load_of(server):
    """Return the response of `/load`, which a slow process can delay."""
    return wait_until(lambda: (reply := server.get("/load")).status == 200 and reply.json)


def test_all_api_processes_give_the_same_response(shared):
    assert len(api_processes(shared)) == NUM_PROCESSES
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: shared.complete(prompt="Anna"), range(32)))
    assert {reply.status for reply in replies} == {200}
    assert len({reply.json["choices"][0]["text"] for reply in replies}) == 1
    assert {shared.get("/props").status for _ in range(8)} == {200}


def test_every_api_process_shows_the_metrics_of_all_api_processes(shared):
    def counted():
        text = shared.get("/metrics").content.decode()
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    def tokens():
        return sum(v for k, v in counted().items() if k.startswith("dovetail_generation_tokens"))

    def reading():
        time.sleep(0.05)
        return tokens()

    # A process counts a request just after its response: wait for the requests of earlier tests.
    wait_until(lambda: len({reading() for _ in range(8)}) == 1)
    before = tokens()
    for _ in range(8):  # both processes serve some of them
        shared.complete(prompt="one", max_tokens=3, ignore_eos=True)
    wait_until(lambda: tokens() == before + 24)
    assert {tokens() for _ in range(8)} == {before + 24}


def test_a_killed_api_process_ends_only_its_own_requests_and_is_restarted(shared):
    pause(shared)
    held = [OpenStream(shared) for _ in range(12)]
    owners = [wait_until(lambda item=item: item.server_of(shared)) for item in held]
    before = api_processes(shared)
    killed = owners[0]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: killed not in api_processes(shared))
    resume(shared)
    contents = [item.read() for item in held]
    for owner, content in zip(owners, contents, strict=True):
        assert content.endswith(b"data: [DONE]\n\n") == (owner != killed)
    after = wait_until(lambda: len(actual := api_processes(shared)) == NUM_PROCESSES and actual)
    assert killed not in after and before - {killed} < after
    shared.wait_for("API process . ended by SIGKILL")
    assert wait_until(lambda: load_of(shared)["kv_cache_usage"] == 0)
    wait_until_all_serve(shared)


@pytest.mark.soak
@pytest.mark.clock
def test_an_api_process_that_is_killed_under_load_is_replaced_in_time(serving, note):
    with serving(*OPTIONS, "--api-processes", str(NUM_PROCESSES)) as server:
        server.wait_until_ready()
        for _ in range(10):
            running = [OpenStream(server, max_tokens=400) for _ in range(16)]
            owners = [wait_until(lambda item=item: item.server_of(server)) for item in running]
            start_s = time.monotonic()
            os.kill(owners[0], signal.SIGKILL)
            with ThreadPoolExecutor(len(running)) as pool:
                contents = list(pool.map(OpenStream.read, running))
            for owner, content in zip(owners, contents, strict=True):
                assert owner == owners[0] or content.endswith(b"data: [DONE]\n\n")
            wait_until(lambda: len(api_processes(server)) == NUM_PROCESSES)
            wait_until_all_serve(server)
            ready_s = time.monotonic() - start_s
            note(f"killed API process: all processes serve after {ready_s:.2f} s")
            assert ready_s < 15
            assert wait_until(lambda: load_of(server)["kv_cache_usage"] == 0)


def test_the_load_of_a_server_counts_the_requests_of_all_processes(shared):
    pause(shared)
    held = held_by_all(shared)
    wait_until(lambda: load_of(shared)["num_waiting"] == len(held))
    # A process counts a request until just after its response: wait for earlier requests.
    end_s, loads = time.monotonic() + WAIT_S, set()
    while loads != {len(held)} and time.monotonic() < end_s:
        loads = {load_of(shared)["server_load"] for _ in range(8)}
    resume(shared)
    assert all(item.read().endswith(b"data: [DONE]\n\n") for item in held)
    assert loads == {len(held)}
    wait_until(lambda: load_of(shared)["server_load"] == 0)


def found_by_all(server, path, status=200):
    """Request a path over many connections, which reach all processes. Return the last reply."""
    replies = [server.get(path) for _ in range(16 * NUM_PROCESSES)]
    assert {reply.status for reply in replies} == {status}
    return replies[-1].json


def test_stored_responses_are_found_continued_and_deleted_by_all_processes(shared):
    requested = {"input": "reverse: robot", "max_output_tokens": 8, "temperature": 0}
    path = f"/v1/responses/{(first := shared.post('/v1/responses', requested).json)['id']}"
    assert found_by_all(shared, path)["output"] == first["output"]
    followed = [
        shared.post("/v1/responses", requested | {"previous_response_id": first["id"]})
        for _ in range(8)
    ]
    assert {reply.status for reply in followed} == {200}
    assert len({reply.json["usage"]["input_tokens"] for reply in followed}) == 1
    assert followed[0].json["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert shared.send("DELETE", path).status == 200
    found_by_all(shared, path, status=404)


def test_files_and_batches_are_found_by_all_processes_and_executed_once(shared):
    address = f"http://{shared.host}:{shared.port}/v1"
    body = {"messages": [{"role": "user", "content": "reverse: robot"}], "max_tokens": 4}
    request = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    lines = [json.dumps({"custom_id": f"line {number}", **request}) for number in range(6)]
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        file = client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint=request["url"], completion_window="24h"
        )
    assert found_by_all(shared, f"/v1/files/{file.id}")["bytes"] == file.bytes
    path = f"/v1/batches/{batch.id}"
    wait_until(lambda: shared.get(path).json["status"] == "completed")
    ended = found_by_all(shared, path)
    assert ended["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
    output = shared.get(f"/v1/files/{ended['output_file_id']}/content").content.decode()
    names = [json.loads(line)["custom_id"] for line in output.splitlines()]
    assert sorted(names) == [f"line {number}" for number in range(6)]


def test_a_running_response_is_cancelled_by_any_process(shared):
    slow = {"input": "Anna", "max_output_tokens": 500, "ignore_eos": True, "stream": True}
    statuses = set()
    for _ in range(4):
        connection = http.client.HTTPConnection(shared.host, shared.port, timeout=WAIT_S)
        try:
            connection.request(
                "POST", "/v1/responses", json.dumps(slow), {"Content-Type": "application/json"}
            )
            reader = connection.getresponse()
            event = next(line for line in reader if line.startswith(b"data:"))
            response_id = json.loads(event.removeprefix(b"data:"))["response"]["id"]
            ended = shared.post(f"/v1/responses/{response_id}/cancel", {})
            assert ended.status == 200
            statuses.add(ended.json["status"])
            reader.read()
        finally:
            connection.close()
    # On a busy machine, a response may reach its limit of tokens before it is cancelled.
    assert "cancelled" in statuses <= {"cancelled", "incomplete"}


@pytest.mark.parametrize("by_id", [True, False])
def test_an_operator_aborts_requests_of_all_processes(shared, by_id):
    pause(shared)
    held = held_by_all(shared)
    wait_until(lambda: load_of(shared)["num_waiting"] == len(held))
    unknown = [f"{'x' * 100}-{n}" for n in range(900)] + ["y" * 100_000]
    ids = [*unknown, *(item.request_id for item in held)]
    body = {"request_ids": ids} if by_id else {"all": True}
    assert shared.post("/abort", body, **OPERATOR).json == {"num_aborted": len(held)}
    assert {json.loads(item.read())["error"]["code"] for item in held} == {"aborted"}
    resume(shared)
    wait_until(lambda: load_of(shared)["kv_cache_usage"] == 0)


def test_a_process_that_does_not_respond_is_reported(shared):
    stopped = next(iter(api_processes(shared)))
    os.kill(stopped, signal.SIGSTOP)
    try:
        reply = shared.get("/load")
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert reply.status == 503 and reply.error["code"] == "process_unavailable"
    assert wait_until(lambda: shared.get("/load").status == 200)


def test_api_processes_attach_to_a_restarted_engine(shared):
    expected = shared.complete(prompt="Anna").json["choices"][0]["text"]
    wait_until(lambda: all(shared.get("/ready").status == 200 for _ in range(20)))
    before = api_processes(shared)
    pause(shared)
    held = [OpenStream(shared) for _ in range(6)]
    for item in held:
        wait_until(lambda item=item: item.server_of(shared))
    wait_until(lambda: load_of(shared)["num_waiting"] >= 6)
    os.kill(engine_of(shared), signal.SIGKILL)
    for item in held:
        assert json.loads(item.read())["error"]["code"] == "engine_failed"
    wait_until(lambda: all(shared.get("/ready").status == 200 for _ in range(20)))
    resume(shared)  # the next engine is paused, too
    wait_until(lambda: all(shared.complete(prompt="Anna").status == 200 for _ in range(20)))
    assert shared.complete(prompt="Anna").json["choices"][0]["text"] == expected
    assert shared.get("/props").status == 200
    assert api_processes(shared) == before


@pytest.mark.slow
def test_a_second_sigterm_ends_the_requests_of_all_processes_with_an_error(serving):
    with serving(*OPTIONS, "--api-processes", str(NUM_PROCESSES)) as server:
        server.wait_until_ready()
        pause(server)
        held = held_by_all(server)
        wait_until(lambda: load_of(server)["num_waiting"] == len(held))
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/ready").status == 503)
        server.process.send_signal(signal.SIGTERM)
        assert {json.loads(item.read())["error"]["code"] for item in held} == {"shutting_down"}
        assert server.process.wait(WAIT_S) == 1


def test_sigterm_drains_all_api_processes(shared):
    pause(shared)
    held = [OpenStream(shared) for _ in range(12)]
    for item in held:
        wait_until(lambda item=item: item.server_of(shared))
    wait_until(lambda: load_of(shared)["num_waiting"] >= 12)
    shared.process.send_signal(signal.SIGTERM)
    wait_until(lambda: shared.get("/ready").status == 503)
    resume(shared)
    for item in held:
        content = item.read()
        assert content.endswith(b"data: [DONE]\n\n") and b'"error"' not in content
    assert shared.process.wait(WAIT_S) == 0


def test_no_process_remains_after_the_main_process_is_killed(serving):
    with serving(*OPTIONS, "--api-processes", str(NUM_PROCESSES)) as server:
        server.wait_until_ready()
        pause(server)
        held = [OpenStream(server) for _ in range(4)]
        for item in held:
            wait_until(lambda item=item: item.server_of(server))
        processes = children_of(server.process.pid)
        assert len(processes) > NUM_PROCESSES
        server.process.kill()
        wait_until(lambda: not any(is_running(process) for process in processes))
        assert {item.read() for item in held} == {b""}
        with pytest.raises(ConnectionError):
            server.get("/live")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("count", ["1", "2"])
@pytest.mark.parametrize(
    ("option", "value"), [("--http-routes", "absent"), ("--kv-cache-memory-bytes", "1")]
)
def test_a_server_that_fails_to_start_exits_with_the_reason(serving, count, option, value):
    options = ("--model", "demo", "--max-model-len", "512", "--api-processes", count)
    with serving(*options, option, value) as server:
        assert server.process.wait(WAIT_S) != 0
    named = value if value == "absent" else "kv_cache_memory_bytes"
    assert any(named in line for line in server.lines if line is not None)
