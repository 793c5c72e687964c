"""Several front ends of one engine have separate requests, outputs and limits."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from dovetail.engine.process import outgoing
from dovetail.engine.process.factory import attach_client
from dovetail.errors import ConfigError, EngineDeadError
from dovetail.interfaces import PauseScope
from dovetail.request import FinishReason
from dovetail.transport.messages import Call, Stop, pack

HERE = Path(__file__).parent


@pytest.fixture
def attach():
    """Attach to the engine of a client: `attach(client)`, `attach(client, "async")`."""
    created = []

    def make(client, kind="sync"):
        created.append(attach_client(client.address, kind))
        return created[-1]

    yield make
    for client in created:
        client.shutdown()
        client.shutdown()


@contextmanager
def front_end_process(client, name):
    """Start a front end in a separate process with three running requests."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "front_end_parent.py"), client.address, name],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "running\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def serve(client, traffic, first):
    client.add_request(first)
    return traffic.Answers().collect_until(client, first.request_id)


def await_stats(client, condition, timeout_s=5):
    """Wait until the engine's statistics meet a condition."""
    end = time.monotonic() + timeout_s
    while not condition(stats := client.get_stats()):
        assert time.monotonic() < end, stats
        time.sleep(0.02)


@pytest.mark.costly
@pytest.mark.parametrize("ahead", [False, True], ids=["depth1", "depth2"])
def test_two_front_ends_can_use_the_same_ids_and_get_their_own_outputs(
    client_of, attach, traffic, ahead
):
    owner = client_of("sync", async_scheduling=ahead)
    requests = traffic.random_requests()
    assert owner.add_requests(requests) == {}
    alone = traffic.Answers().collect(owner, len(requests))
    other = attach(owner)
    prompts = {
        name: [n % 90, 7, 7] for n, name in enumerate(request.request_id for request in requests)
    }
    others = [traffic.request(name, prompt, 11) for name, prompt in prompts.items()]
    expected = {
        name: serve(owner, traffic, traffic.request(name, p, 11))[0][name]
        for name, p in prompts.items()
    }
    assert owner.add_requests(requests) == {} == other.add_requests(others)
    actual = (
        traffic.Answers().collect(owner, len(requests)),
        traffic.Answers().collect(other, len(others)),
    )
    assert actual[0] == alone
    assert actual[1][0] == expected
    assert {reason for reason, _ in actual[1][1].values()} == {FinishReason.LENGTH}
    assert owner.facts.front_end == 0 and other.facts.front_end == 1
    assert other.process_id == owner.process_id and other.address == owner.address


@pytest.mark.costly
def test_a_front_end_cannot_abort_or_read_requests_of_other_front_ends(client_of, attach, traffic):
    owner = client_of("sync", step_s=0.005)
    first, second = attach(owner), attach(owner)
    owner.add_request(traffic.request("a", max_tokens=60))
    first.add_request(traffic.request("a", [5, 5], max_tokens=60))
    second.add_request(traffic.request("mine", [5, 5], max_tokens=5))
    results = [traffic.Answers() for _ in range(2)]
    names = ("a", "a\x1f0", "a\x1f1", "a\x1f2", "a\x1f1\x1f2")
    for name in names:
        second.abort_requests([name])
        first.abort_requests([f"{name}\x1f1"])
    owner.abort_requests(["a\x1f1", "a\x1f0"])
    assert len(results[0].collect(owner, 1)[0]["a"]) == 60
    assert len(results[1].collect(first, 1)[0]["a"]) == 60
    tokens, ends = traffic.Answers().collect(second, 1)
    assert set(tokens) == set(ends) == {"mine"}
    while (
        outputs := second.get_outputs(0.2)
    ) is not None:  # the outputs may contain only statistics
        assert not outputs.request_ids and not outputs.finished
    # Ids that look like those of another front end are valid.
    for name in names[1:]:
        assert len(serve(owner, traffic, traffic.request(name, max_tokens=3))[0][name]) == 3
        assert len(serve(first, traffic, traffic.request(name, max_tokens=3))[0][name]) == 3


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", ["killed", "closed"])
def test_a_front_end_that_exits_ends_only_its_own_requests(client_of, attach, traffic, parts, how):
    owner = client_of("sync", step_s=0.005, async_scheduling=True)
    alone = serve(owner, traffic, traffic.request("r0", max_tokens=300))[0]["r0"]
    owner.reset_prefix_cache()
    second = attach(owner)
    second.add_request(traffic.request("r0", max_tokens=300))
    owner.add_request(traffic.request("r0", max_tokens=300))
    with front_end_process(owner, "r") as process:
        await_stats(owner, lambda stats: stats.num_running == 5)
        if how == "killed":
            process.kill()
        else:
            process.stdin.close()
        await_stats(owner, lambda stats: stats.num_running <= 2)
        assert owner.get_stats().num_aborted == 3
    for client in (owner, second):
        assert traffic.Answers().collect_until(client, "r0")[0]["r0"] == alone
    await_stats(owner, lambda stats: stats.num_used_blocks == 0)


@pytest.mark.costly
def test_held_requests_of_a_killed_idle_front_end_are_freed(client_of, traffic):
    """The engine sends only heartbeats to this front end, and detects its exit by a failed send."""
    owner = client_of("sync", step_s=0.005)
    with front_end_process(owner, "r") as process:
        owner.pause(PauseScope.ALL)
        time.sleep(0.1)
        process.kill()
        await_stats(owner, lambda stats: stats.num_running + stats.num_waiting == 3)
        time.sleep(1.5)
        owner.resume()
    owner.add_request(traffic.request("a", max_tokens=3))
    traffic.Answers().collect(owner, 1)
    await_stats(owner, lambda stats: stats.num_aborted == 3 and not stats.num_running)


@pytest.mark.costly
def test_a_front_end_that_does_not_read_does_not_delay_other_front_ends(client_of, attach, traffic):
    owner = client_of("sync")
    slow, fast = attach(owner), attach(owner)
    slow.add_requests([traffic.request(f"s{n}", max_tokens=400) for n in range(2)])
    for number in range(6):  # more steps than the flow-control window of `slow` allows
        tokens, _ = serve(fast, traffic, traffic.request("f", [number, 3], max_tokens=100))
        assert len(tokens["f"]) == 100
    tokens, _ = traffic.Answers().collect(slow, 2)  # no output was lost
    assert {name: len(arguments) for name, arguments in tokens.items()} == {"s0": 400, "s1": 400}


@pytest.mark.costly
def test_requests_of_a_front_end_that_reads_too_slowly_end_with_an_error(
    client_of, attach, traffic, parts
):
    owner = client_of("sync", step_s=0.01, options={"worker_cls": parts.SmallBufferWorker})
    slow, fast = attach(owner), attach(owner)
    slow.add_requests([traffic.request(f"s{n}", max_tokens=490) for n in range(2)])
    serve(fast, traffic, traffic.request("f", [4, 3], max_tokens=300))
    _, ends = traffic.Answers().collect(slow, 2)
    assert {reason for reason, _ in ends.values()} == {FinishReason.ERROR}
    assert "reads too slowly" in ends["s0"][1]
    assert len(serve(slow, traffic, traffic.request("again", max_tokens=3))[0]["again"]) == 3


@pytest.mark.costly
def test_all_front_ends_share_the_pause_and_the_prefix_cache(client_of, attach, traffic):
    owner = client_of("sync")
    other = attach(owner)
    owner.add_request(traffic.request("a", max_tokens=300))
    assert owner.get_outputs(5) is not None
    other.pause(PauseScope.ALL)
    while owner.paused is None:
        owner.get_outputs(0.1)
    assert owner.paused is other.paused is PauseScope.ALL
    assert not owner.reset_prefix_cache() and not other.reset_prefix_cache()
    other.shutdown()  # a pause continues after its front end has shut down
    steps = owner.get_stats().step_id
    assert owner.get_stats().step_id == steps and owner.paused is PauseScope.ALL
    owner.resume()
    assert owner.paused is None
    traffic.Answers().collect_until(owner, "a")
    assert attach(owner).reset_prefix_cache()


@pytest.mark.costly
def test_all_front_ends_are_notified_when_the_engine_ends(client_of, attach, traffic):
    async def serve_two():
        owner = client_of("sync", step_s=0.01)
        others = [attach(owner), attach(owner, "async")]
        others[0].add_request(traffic.request("a", max_tokens=400))
        await others[1].add_request(traffic.request("a", max_tokens=400))
        assert await others[1].call_workers("echo", (1,)) == [[[1], {}]]
        os.kill(owner.process_id, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await traffic.Answers().collect_async(others[1], 1)
        for client in (owner, others[0]):
            with pytest.raises(EngineDeadError):
                traffic.Answers().collect(client, 1)

    asyncio.run(serve_two())


@pytest.mark.costly
def test_an_attached_front_end_cannot_shut_the_engine_down(client_of, attach, traffic):
    owner = client_of("sync")
    attach(owner).shutdown()
    with traffic.raw_front_end(owner.address) as (to_engine, _):
        to_engine.send(pack(Stop()))
        while not owner.progress.num_rejected:
            owner.get_outputs(0.2)
    assert len(serve(owner, traffic, traffic.request("a", max_tokens=3))[0]["a"]) == 3


@pytest.mark.costly
def test_an_invalid_address_is_rejected(client_of, tmp_path):
    owner = client_of("sync")
    path = Path(owner.address)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    (tmp_path / "input").write_text("")
    for address in ("", None, "/no/such/socket", str(tmp_path / "input"), str(path.parent), "\0"):
        with pytest.raises(ConfigError, match="address="):
            attach_client(address, "sync")
    with pytest.raises(ConfigError, match="'inproc'"):
        attach_client(owner.address, "inproc")
    os.kill(owner.process_id, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match="No engine responded"):
        attach_client(owner.address, "sync", timeout_s=0.3)
    assert time.monotonic() - start < 2
    os.kill(owner.process_id, signal.SIGCONT)


@pytest.mark.costly
def test_many_results_of_calls_do_not_delay_the_steps(client_of, attach, traffic):
    """Results of calls count as messages in flight and are acknowledged like outputs."""
    owner = client_of("sync")
    for client in (owner, attach(owner)):
        for _ in range(3 * outgoing.MAX_UNREAD_MESSAGES):
            client.check_health()
        assert len(serve(client, traffic, traffic.request("a", max_tokens=3))[0]["a"]) == 3

    async def serve_one():
        other = attach(owner, "async")
        await asyncio.gather(*(other.check_health() for _ in range(200)))
        await other.add_request(traffic.request("b", max_tokens=3))
        assert len((await traffic.Answers().collect_async(other, 1))[0]["b"]) == 3

    asyncio.run(serve_one())


@pytest.mark.costly
def test_a_front_end_that_never_reads_the_results_of_its_calls_is_detached(
    client_of, traffic, parts
):
    owner = client_of("sync", options={"worker_cls": parts.SmallBufferWorker})
    with traffic.raw_front_end(owner.address) as (to_engine, _):
        arguments = msgspec.msgpack.encode(("echo", ("x" * 5000,), {}))
        for _ in range(100):
            to_engine.send(pack(Call(1, "call_workers", arguments)))
        end = time.monotonic() + 10
        while not owner.progress.num_rejected:
            assert time.monotonic() < end, "it still receives results"
            to_engine.send(pack(Call(1, "check_health", msgspec.msgpack.encode(()))))
            owner.get_outputs(0.2)
    assert len(serve(owner, traffic, traffic.request("a", max_tokens=3))[0]["a"]) == 3


def test_the_buffer_for_a_slow_front_end_is_larger_than_the_flow_control_window():
    assert outgoing.MAX_UNREAD_BYTES < outgoing.MAX_KEPT_BYTES
