"""All engine clients give the same results and are notified when the engine exits."""

import asyncio
import os
import signal
import stat
import time
from pathlib import Path

import pytest

from dovetail.engine.client import EngineClient
from dovetail.engine.process.boot import INPUT_SOCKET, OUTPUT_SOCKET
from dovetail.engine.process.engine_process import EngineProcess
from dovetail.engine.process.factory import make_client
from dovetail.errors import (
    CapacityError,
    ConfigError,
    DovetailError,
    EngineDeadError,
    RequestError,
    UserError,
)
from dovetail.interfaces import PauseScope
from dovetail.request import FinishReason
from dovetail.transport.remote_error import RemoteError


def named_facts(info):
    """Return the engine's properties with each class replaced by its name."""
    return info.config.model_dump_json(), info.model_info, info.max_model_len


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize("ahead", [False, True], ids=["depth1", "depth2"])
def test_all_kinds_of_engine_clients_return_the_same_outputs(client_of, ahead, traffic):
    requests = [
        *traffic.random_requests(),
        traffic.request("long", range(90), 500),
        traffic.request("bad", [97]),
    ]
    requests += [traffic.request("twice"), traffic.request("twice")]
    collected = []
    for kind in ("inproc", "sync"):
        client = client_of(kind, async_scheduling=ahead)
        assert isinstance(client, EngineClient)
        rejected = client.add_requests(requests)
        assert client.progress.num_rejected == 0
        collected.append(
            (traffic.Answers().collect(client, 22), refusals(rejected), named_facts(client.facts))
        )
        client.shutdown()

    async def serve():
        client = client_of("async", async_scheduling=ahead)
        rejected = await client.add_requests(requests)
        arguments = await traffic.Answers().collect_async(client, 22)
        return arguments, refusals(rejected), named_facts(client.facts)

    collected.append(asyncio.run(serve()))
    assert collected[0] == collected[1] == collected[2]
    (tokens, ends), rejected, _ = collected[0]
    assert len(tokens) == len(ends) == 22 and len(tokens["long"]) > 100
    assert set(rejected) == {"bad", "twice"}
    assert rejected["bad"][1] == "prompt" and "97" in rejected["bad"][0]


def refusals(named_facts):
    return {name: (str(error), error.parameter) for name, error in named_facts.items()}


@pytest.mark.costly
def test_requests_rejected_by_the_engine_are_reported_with_the_outputs(client_of, traffic):
    with pytest.raises(RequestError, match="97"):
        client_of("inproc").add_request(traffic.request("bad", [97]))
    client = client_of("sync")
    client.add_request(traffic.request("bad", [97]))
    client.add_request(traffic.request("good"))
    tokens, ends = traffic.Answers().collect(client, 2)
    assert ends["bad"][0] is FinishReason.ERROR and "97" in ends["bad"][1]
    assert len(tokens["good"]) == 5


@pytest.mark.costly
def test_requests_too_large_for_one_message_are_split(client_of, monkeypatch, traffic):
    monkeypatch.setattr("dovetail.engine.process.channel._BATCH_BYTES", 300)
    requests = [
        *traffic.random_requests(),
        traffic.request("huge", [2**40]),
        traffic.request("bad", [97]),
    ]
    client = client_of("sync")
    rejected = client.add_requests(requests)
    assert {name: error.parameter for name, error in rejected.items()} == {
        "huge": "prompt",
        "bad": "prompt",
    }
    assert len(traffic.Answers().collect(client, 20)[1]) == 20


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["inproc", "sync"])
def test_engine_calls_return_their_results(client_of, kind, traffic):
    client = client_of(kind)
    assert client.call_workers("echo", (1, "x"), {"deep": [None]}) == [[[1, "x"], {"deep": [None]}]]
    client.pause(PauseScope.ALL)
    assert client.paused is PauseScope.ALL
    client.add_request(traffic.request("held"))
    counted = client.get_outputs(5)  # no request runs, but the statistics are current
    assert counted.request_ids == [] and counted.stats.num_waiting == 1
    assert client.get_outputs(0.05) is None
    client.resume()
    assert client.paused is None
    assert set(traffic.Answers().collect(client, 1)[1]) == {"held"}
    client.add_request(traffic.request("under way", max_tokens=400))
    while client.get_outputs(5) is None:
        pass
    client.pause(PauseScope.ALL)
    assert not client.reset_prefix_cache()
    client.abort_requests(["under way", "never"])
    client.resume()
    assert client.reset_prefix_cache()


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["inproc", "sync"])
def test_an_aborted_request_gets_no_more_outputs(client_of, kind, traffic):
    """An id can be reused immediately. No token of the first request reaches the second."""
    client = client_of(kind, step_s=0.001)
    client.add_request(traffic.request("stays", max_tokens=60))
    for _ in range(10):
        client.add_request(traffic.request("again", [5] * 9, max_tokens=400))
        for _ in range(3):
            client.get_outputs(5)
        client.abort_requests(["again", "unheard"])
    client.add_request(traffic.request("again", [1, 2, 3], max_tokens=7))
    tokens, ends = traffic.Answers().collect(client, 2)
    assert len(tokens["again"]) == 7 and ends["again"][0] is FinishReason.LENGTH
    assert tokens["again"] == tokens_alone(
        traffic, client, traffic.request("alone", [1, 2, 3], max_tokens=7)
    )


def tokens_alone(traffic, client, first):
    client.add_request(first)
    return traffic.Answers().collect(client, 1)[0][first.request_id]


@pytest.mark.costly
def test_engine_progress_contains_steps_and_missed_heartbeats(client_of, traffic):
    client = client_of("sync", step_s=0.15)
    client.add_request(traffic.request("a", max_tokens=9))
    traffic.Answers().collect(client, 1)
    assert client.progress.num_steps >= 2
    assert client.progress.age_s < 1
    os.kill(client.process_id, signal.SIGSTOP)
    time.sleep(0.3)
    client.add_request(traffic.request("b"))
    assert client.get_outputs(0.2) is None
    assert client.progress.age_s > 0.4 and client.error is None
    os.kill(client.process_id, signal.SIGCONT)
    assert len(traffic.Answers().collect(client, 1)[0]["b"]) == 5


@pytest.mark.costly
def test_a_failed_call_does_not_affect_requests(client_of, traffic):
    client = client_of("sync", step_s=0.002)
    client.add_request(traffic.request("a", max_tokens=40))
    with pytest.raises(DovetailError, match="not today"):
        client.call_workers("raise_value_error")
    with pytest.raises(DovetailError, match="cannot be sent"):
        client.call_workers("odd")
    with pytest.raises(DovetailError):
        client.call_workers("no_such_method")
    for name in ("__init_subclass__", "shutdown", "os:getpid", "execute_model", ""):
        with pytest.raises(DovetailError):
            client.call_workers(name)
    with pytest.raises(UserError, match="Pass the name of a worker"):
        client.call_workers(len)
    with pytest.raises(UserError, match=r"call_workers: args=.* cannot be sent"):
        client.call_workers("echo", (print,))
    assert len(traffic.Answers().collect(client, 1)[0]["a"]) == 40


@pytest.mark.costly
def test_engine_calls_return_while_outputs_are_streamed(client_of, traffic):
    async def serve():
        client = client_of("async", step_s=0.005)
        await client.add_request(traffic.request("a", max_tokens=30))
        ends = asyncio.create_task(traffic.Answers().collect_async(client, 1))
        echoes = await asyncio.gather(*(client.call_workers("echo", (n,)) for n in range(5)))
        assert echoes == [[[[n], {}]] for n in range(5)]
        await client.pause(PauseScope.NEW)
        await client.resume()
        assert len((await ends)[0]["a"]) == 30
        assert await client.reset_prefix_cache()

    asyncio.run(serve())


@pytest.mark.costly
def test_calls_of_a_client_that_was_shut_down_raise_an_error(client_of, traffic):
    client = client_of("sync")
    client.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        client.get_outputs()

    async def serve():
        client = client_of("async")
        waiting = asyncio.create_task(client.get_outputs())
        await asyncio.sleep(0.01)
        client.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await waiting

    asyncio.run(serve())


@pytest.mark.costly
def test_a_failed_start_reports_the_reason(client_of, engine_config, traffic):
    with pytest.raises(CapacityError, match="7 GB; there are 3"):
        client_of("sync", start="raises")
    with pytest.raises(EngineDeadError, match="status 3"):
        client_of("sync", start="exits")
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"within 1\.5 s"):
        EngineProcess(engine_config(start="hangs"), start_timeout_s=1.5)
    assert time.monotonic() - start < 10
    with pytest.raises(ConfigError, match="'threads' is not an engine client"):
        make_client(engine_config(), "threads")


@pytest.mark.costly
def test_only_the_owner_can_access_the_sockets_of_an_engine(client_of, traffic):
    folder = Path(client_of("sync").address).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in (INPUT_SOCKET, OUTPUT_SOCKET):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600


def test_errors_from_another_process_keep_their_class():
    assert isinstance(RemoteError("CapacityError", "no").error(), CapacityError)
    assert RemoteError("EngineDeadError", "no", "step 1").error().digest == "step 1"
    for kind in ("Path", "nearest", "__builtins__", "unheard"):
        assert type(RemoteError(kind, "no").error()) is DovetailError
