"""A supervised engine restarts after a crash: callers get errors, new requests are served."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from dovetail.engine.channel import EngineState, Reply
from dovetail.engine.port import EnginePort
from dovetail.engine.process.factory import make_client
from dovetail.engine.supervision.rules import SupervisionRules
from dovetail.errors import EngineDeadError, RequestError, UnavailableError
from dovetail.interfaces import EngineCoreOutputs, PauseScope
from dovetail.request import FinishReason
from dovetail_devkit.harnesses.process_tree import children_of

ROUNDS = [pytest.param(2, id="2"), pytest.param(40, id="40", marks=pytest.mark.soak)]
MANY = SupervisionRules(max_restarts=1000, max_delay_s=0.1)
WAIT_S = 30.0
"""The time limit for reaching a state of the engine; it is long for loaded machines."""


@pytest.fixture
def supervised(engine_config, traffic, monkeypatch, tmp_path_factory):
    """Start a supervised engine: `supervised(rules=…, executor="multiproc", step_s=0.01)`."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("t")))
    before, created = traffic.open_resources(), []

    def make(kind="sync", *, rules=None, executor="auto", options=None, **worker_config):
        config = engine_config(options=options or {}, **worker_config)
        parallel = config.parallel.model_copy(update={"executor_backend": executor})
        config = config.model_copy(update={"parallel": parallel})
        created.append(make_client(config, kind, rules=rules or SupervisionRules()))
        return created[-1]

    yield make
    for client in created:
        client.shutdown()
        client.shutdown()
        assert client.state is EngineState.DEAD
    assert traffic.open_resources() == before


def await_state(client, state, within_s):
    start = time.monotonic()
    while client.state is not state:
        assert time.monotonic() - start < within_s, f"{client.state} instead of {state}"
        time.sleep(0.02)
    return time.monotonic() - start


def serve_standard(client, traffic):
    client.add_request(traffic.request("standard", range(20), 12))
    return traffic.Answers().collect_until(client, "standard")[0]["standard"]


@pytest.mark.costly
def test_receive_reports_the_requests_of_an_engine_that_failed_before_the_call(
    supervised, traffic, monkeypatch
):
    """`receive` detects that the engine has failed.

    It must not wait for messages of the next engine.
    """
    monkeypatch.setattr("dovetail.engine.supervision.supervisor._LOOK_S", 1000.0)
    client = supervised(rules=MANY)
    link = client.channel._supervisor.channel().link
    os.kill(client.process_id, signal.SIGSTOP)
    call = client._make_call(EnginePort.reset_prefix_cache, ())
    client.channel.send(call)
    client.add_request(traffic.request("standard", range(20), 12))
    os.kill(client.process_id, signal.SIGKILL)
    assert link.has_ended(5)
    actual = [client.channel.receive(20) for _ in range(2)]
    (reply,) = (item for item in actual if isinstance(item, Reply))
    with pytest.raises(UnavailableError):
        reply.result()
    (outputs,) = (item for item in actual if isinstance(item, EngineCoreOutputs))
    assert [end.request_id for end in outputs.finished] == ["standard"]


@pytest.mark.costly
@pytest.mark.timeout(900)
@pytest.mark.sampled(4)
@pytest.mark.parametrize("victim", ["engine", "worker"])
@pytest.mark.parametrize("num_rounds", ROUNDS)
def test_a_restarted_engine_gives_the_same_outputs(supervised, traffic, num_rounds, victim):
    client = supervised(executor="multiproc", rules=MANY, step_s=0.005)
    expected = serve_standard(client, traffic)
    for number in range(num_rounds):
        names = {f"r{number}-{n}" for n in range(4)}
        for name in sorted(names):
            client.add_request(traffic.request(name, max_tokens=400))
        outputs = traffic.Answers()
        while not outputs.tokens:
            outputs.take(client.get_outputs(5))
        engine = client.process_id
        (worker,) = children_of(engine)
        os.kill(engine if victim == "engine" else worker, signal.SIGKILL)
        start = time.monotonic()
        while len(outputs.ends) < len(names):
            outputs.take(client.get_outputs(5))
        assert time.monotonic() - start < 2
        assert set(outputs.ends) == names
        for reason, message in outputs.ends.values():
            assert reason is FinishReason.ERROR
            assert "EngineDeadError" in message and "SIGKILL" in message
        assert client.wait_until_ready(WAIT_S)
        assert client.state is EngineState.READY
        assert client.num_restarts == number + 1 and client.process_id != engine
        assert not traffic.is_running(worker) and not traffic.is_running(engine)
        assert serve_standard(client, traffic) == expected


@pytest.mark.costly
def test_requests_of_an_event_loop_are_served_after_a_restart(supervised, traffic):
    async def serve():
        client = supervised("async", rules=MANY, step_s=0.01)
        await client.add_request(traffic.request("standard", range(20), 12))
        tokens, _ = await traffic.Answers().collect_async(client, 1)
        await client.add_request(traffic.request("a", max_tokens=400))
        await client.get_outputs()
        os.kill(client.process_id, signal.SIGKILL)
        start = time.monotonic()
        _, ends = await traffic.Answers().collect_async(client, 1)
        assert time.monotonic() - start < 2
        assert ends["a"][0] is FinishReason.ERROR and "SIGKILL" in ends["a"][1]
        with pytest.raises(UnavailableError, match="is being restarted"):
            await client.add_request(traffic.request("too early"))
        assert client.state is EngineState.RESTARTING
        waiting = asyncio.create_task(client.get_outputs())
        while client.state is not EngineState.READY:
            await asyncio.sleep(0.02)
        await client.add_request(traffic.request("standard", range(20), 12))
        outputs = traffic.Answers()
        outputs.take(await asyncio.wait_for(waiting, 10))
        assert (await outputs.collect_async(client, 1))[0] == tokens
        assert client.num_restarts == 1 and client.error is None
        client.shutdown()
        with pytest.raises(EngineDeadError):
            await client.get_outputs()

    asyncio.run(serve())


@pytest.mark.costly
def test_crashing_requests_of_one_client_do_not_exhaust_the_restarts_of_other_clients(
    supervised, traffic
):
    client = supervised(dies_of=6, rules=SupervisionRules(first_delay_s=0.02, max_delay_s=0.05))
    messages = []
    for number in range(6):
        with suppress(RequestError):
            client.add_request(traffic.request(f"crashing{number}", (6, 6), max_tokens=100))
            messages.append(traffic.Answers().collect(client, 1)[1][f"crashing{number}"][1])
        assert client.wait_until_ready(WAIT_S)
        client.add_request(traffic.request("valid", max_tokens=2))
        assert traffic.Answers().collect(client, 1)[1]["valid"][0] is FinishReason.LENGTH
    assert len(messages) == client.num_restarts == 2
    assert all("the chip melted" in message for message in messages)
    rejected = client.add_requests(
        [traffic.request("p", (6, 6), 100), traffic.request("b", (2,), 1)]
    )
    assert {name: error.parameter for name, error in rejected.items()} == {"p": "prompt"}


@pytest.mark.costly
def test_crashes_of_different_requests_do_not_exhaust_the_restarts(supervised, traffic):
    rules = SupervisionRules(max_restarts=1, first_delay_s=0.01, max_delay_s=0.05)
    client = supervised(dies_of=6, rules=rules)
    for number in range(4):
        names = [f"crashing{number}"]
        client.add_request(traffic.request(names[0], (6, number), max_tokens=9 + number))
        # The engine has served a valid request, so it works without the crashing request.
        if number == 3:
            names.append("concurrent")
            client.add_request(traffic.request("concurrent", (5,), max_tokens=400))
        _, ends = traffic.Answers().collect(client, len(names))
        assert {ends[name][0] for name in names} == {FinishReason.ERROR}
        assert client.wait_until_ready(WAIT_S)
        if number >= 2:
            serve_standard(client, traffic)
    assert client.num_restarts == 4 and client.state is EngineState.READY


@pytest.mark.costly
def test_a_request_that_ran_with_a_crashing_request_is_served_eventually(supervised, traffic):
    client = supervised(dies_of=6, rules=SupervisionRules(first_delay_s=0.02, max_delay_s=0.05))
    rejected, served = set(), 0
    for number in range(6):
        sent = []
        for name, prompt, length in (("crashing", (6, 6), 100), ("valid", (5, 5), 2)):
            try:
                client.add_request(traffic.request(f"{name}{number}", prompt, max_tokens=length))
                sent.append(f"{name}{number}")
            except (RequestError, UnavailableError) as error:
                rejected.add((name, type(error)))
        _, ends = traffic.Answers().collect(client, len(sent)) if sent else ((), {})
        served += ends.get(f"valid{number}", [""])[0] is FinishReason.LENGTH
        assert client.wait_until_ready(WAIT_S)
    assert ("crashing", RequestError) in rejected and ("valid", RequestError) not in rejected
    assert served >= 2


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kind", "victim"),
    [
        ("sync", "worker"),
        ("async", "engine"),
        pytest.param("sync", "engine", marks=pytest.mark.slow),
        pytest.param("async", "worker", marks=pytest.mark.slow),
    ],
)
def test_a_killed_idle_engine_is_restarted_without_a_call(supervised, kind, victim):
    client = supervised(kind, executor="multiproc", rules=MANY)
    engine = client.process_id
    os.kill(engine if victim == "engine" else min(children_of(engine)), signal.SIGKILL)
    assert await_state(client, EngineState.RESTARTING, 1.0) < 1.0
    await_state(client, EngineState.READY, WAIT_S)
    assert client.num_restarts == 1 and client.process_id != engine


@pytest.mark.costly
@pytest.mark.parametrize(
    "scope", [PauseScope.NEW, pytest.param(PauseScope.ALL, marks=pytest.mark.slow)]
)
def test_a_pause_is_kept_across_a_restart(supervised, traffic, scope):
    client = supervised(rules=MANY)
    client.pause(scope)
    os.kill(client.process_id, signal.SIGKILL)
    await_state(client, EngineState.RESTARTING, WAIT_S)
    assert client.wait_until_ready(WAIT_S) and client.paused is scope
    client.add_request(traffic.request("held", max_tokens=2))
    for _ in range(3):
        outputs = client.get_outputs(0.1)  # the outputs are None or only statistics
        assert outputs is None or not (outputs.request_ids or outputs.finished)
    client.abort_requests(["held"])
    client.resume()
    assert client.paused is None and serve_standard(client, traffic)
    os.kill(client.process_id, signal.SIGKILL)
    await_state(client, EngineState.RESTARTING, WAIT_S)
    assert (
        client.wait_until_ready(WAIT_S)
        and client.paused is None
        and serve_standard(client, traffic)
    )


@pytest.mark.costly
def test_an_engine_that_replaces_a_sleeping_engine_sleeps(supervised, parts, traffic):
    options = {"worker_cls": parts.SleepModeWorker, "enable_sleep_mode": True}
    client = supervised(rules=MANY, options=options)
    client.sleep(2)
    client.wake_up(("weights",))
    os.kill(client.process_id, signal.SIGKILL)
    await_state(client, EngineState.RESTARTING, WAIT_S)
    assert client.wait_until_ready(WAIT_S) and client.paused is PauseScope.ALL
    assert client.call_workers("calls_so_far") == [["sleep 2", "wake up weights"]]
    client.wake_up(("kv_cache",))
    assert client.paused is None and serve_standard(client, traffic)


@pytest.mark.costly
def test_a_pause_in_an_event_loop_is_kept_across_a_restart(supervised, traffic):
    async def serve():
        client = supervised("async", rules=MANY)
        await client.pause(PauseScope.ALL)
        os.kill(client.process_id, signal.SIGKILL)
        while client.state is not EngineState.RESTARTING:
            await asyncio.sleep(0.02)
        while client.state is not EngineState.READY:
            await asyncio.sleep(0.02)
        assert client.paused is PauseScope.ALL
        await client.add_request(traffic.request("held", max_tokens=2))
        outputs = traffic.Answers()
        with pytest.raises(asyncio.TimeoutError):
            while True:
                outputs.take(await asyncio.wait_for(client.get_outputs(), 0.3))
        assert not outputs.tokens and not outputs.ends
        await client.resume()
        assert (await outputs.collect_async(client, 1))[1]["held"][0] is FinishReason.LENGTH

    asyncio.run(serve())


@pytest.mark.costly
def test_an_engine_that_always_crashes_is_not_restarted_and_reports_the_reason(
    supervised, traffic, monkeypatch
):
    rules = SupervisionRules(max_restarts=2, first_delay_s=0.05)
    client = supervised(rules=rules, step_s=0.01)
    client.add_request(traffic.request("a", max_tokens=400))
    assert client.get_outputs(5) is not None
    monkeypatch.setenv("DOVETAIL_FAULTS", "start.load_model:exit=9")
    os.kill(client.process_id, signal.SIGKILL)
    _, ends = traffic.Answers().collect(client, 1)
    assert ends["a"][0] is FinishReason.ERROR
    with pytest.raises(EngineDeadError, match=r"failed 3 times .* status 9.*load_model"):
        client.get_outputs(20)
    assert client.state is EngineState.DEAD and client.error is not None
    with pytest.raises(EngineDeadError, match="is not restarted"):
        client.add_request(traffic.request("b"))
    client.abort_requests(["a"])


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize("victim", ["engine", "worker"])
def test_a_stopped_process_is_reported_as_stalled_and_can_recover(supervised, traffic, victim):
    rules = None if victim == "worker" else SupervisionRules(max_silence_s=1.2)
    client = supervised(executor="multiproc", rules=rules, step_s=0.01)
    expected = serve_standard(client, traffic)
    pid = client.process_id if victim == "engine" else min(children_of(client.process_id))
    os.kill(pid, signal.SIGSTOP)
    assert await_state(client, EngineState.STALLED, WAIT_S) > 0.5
    os.kill(pid, signal.SIGCONT)
    await_state(client, EngineState.READY, WAIT_S)
    assert serve_standard(client, traffic) == expected
    assert client.num_restarts == 0


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize("victim", ["engine", "worker"])
def test_a_process_that_stays_stopped_is_killed_and_restarted(supervised, traffic, victim):
    rules = SupervisionRules(max_silence_s=0.6, kill_silence_s=1.2, first_delay_s=0.05)
    client = supervised(executor="multiproc", rules=rules, step_s=0.01)
    expected = serve_standard(client, traffic)
    client.add_request(traffic.request("a", max_tokens=400))
    engine, (worker,) = client.process_id, children_of(client.process_id)
    os.kill(engine if victim == "engine" else worker, signal.SIGSTOP)
    _, ends = traffic.Answers().collect(client, 1)
    assert "no heartbeat" in ends["a"][1] or victim == "worker"
    assert client.wait_until_ready(WAIT_S)
    assert not traffic.is_running(worker) and not traffic.is_running(engine)
    assert serve_standard(client, traffic) == expected


@pytest.mark.costly
def test_a_long_step_is_reported_as_a_stall_only_above_the_limit(supervised, traffic):
    rules = SupervisionRules(max_silence_s=0.8, max_step_s=1.5, kill_step_s=2, first_delay_s=0.05)
    client = supervised(rules=rules, step_s=600)
    client.add_request(traffic.request("a"))
    start = time.monotonic()
    while client.state is EngineState.READY:
        time.sleep(0.02)
    assert time.monotonic() - start > 1.3
    assert client.state is EngineState.STALLED
    _, ends = traffic.Answers().collect(client, 1)
    assert "a step has not completed" in ends["a"][1]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_full_load_and_long_steps_are_not_reported_as_stalls(supervised, traffic):
    client = supervised(executor="multiproc", step_s=6)
    burn = [sys.executable, "-c", "while True: pass"]
    burners = [subprocess.Popen(burn) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        start = time.monotonic()
        results = traffic.Answers()
        for number in range(8):
            client.add_request(traffic.request(f"r{number}", max_tokens=400))
        while time.monotonic() - start < 60:
            assert client.state is EngineState.READY, client.progress
            outputs = client.get_outputs(0.05)
            if outputs is not None:
                results.take(outputs)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert client.num_restarts == 0 and results.tokens


@pytest.mark.costly
def test_a_failed_start_is_reported_and_leaves_no_process_or_file(supervised):
    with pytest.raises(Exception, match=r"7 GB.*load_model"):
        supervised(start="raises")
