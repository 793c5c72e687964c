"""When an engine exits for any reason, waiting callers are notified and no process is left."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dovetail.errors import ConfigError, EngineDeadError

HERE = Path(__file__).parent
ROUNDS = [pytest.param(3, id="3"), pytest.param(40, id="40", marks=pytest.mark.soak)]
PARENTS = [pytest.param(3, id="3"), pytest.param(25, id="25", marks=pytest.mark.soak)]


@pytest.mark.costly
@pytest.mark.parametrize("num_rounds", ROUNDS)
def test_a_killed_engine_is_reported_and_a_new_engine_gives_the_same_outputs(
    client_of, traffic, num_rounds
):
    standard = traffic.request("standard", range(20), 12)
    client = client_of("sync", step_s=0.005, has_child=1)
    client.add_request(standard)
    expected = traffic.Answers().collect(client, 1)
    for number in range(num_rounds):
        child = client.call_workers("child_pid")[0]
        kill_mid_decode(client, traffic, 0.01 * (number % 7))
        for call, *arguments in (
            (client.get_outputs,),
            (client.resume,),
            (client.add_request, standard),
            (client.call_workers, "echo"),
        ):
            with pytest.raises(EngineDeadError):
                call(*arguments)
        client.abort_requests(["r0"])
        assert not traffic.is_running(child), "processes started by the engine must end with it"
        client.shutdown()
        client = client_of("sync", step_s=0.005, has_child=1)
        client.add_request(standard)
        assert traffic.Answers().collect(client, 1) == expected


def kill_mid_decode(client, traffic, after_s):
    """Kill the engine while four requests run. Check that the caller is notified within 2 s."""
    for number in range(4):
        client.add_request(traffic.request(f"r{number}", max_tokens=400))
    assert client.get_outputs(5) is not None
    time.sleep(after_s)
    os.kill(client.process_id, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        while True:
            client.get_outputs()
    assert time.monotonic() - start < 2
    assert isinstance(client.error, EngineDeadError)


@pytest.mark.costly
def test_only_the_owner_can_access_the_files_of_a_running_engine(client_of):
    folder = Path(client_of("sync").address).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    modes = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert modes and set(modes.values()) == {0o600}, modes


@pytest.mark.costly
def test_a_full_disk_at_engine_startup_is_reported(client_of, monkeypatch):
    def fail(prefix):
        raise OSError(errno.ENOSPC, "No space left on device", prefix)

    monkeypatch.setattr("tempfile.mkdtemp", fail)
    with pytest.raises(ConfigError, match=r"No space left.*TMPDIR"):
        client_of("sync")


@pytest.mark.costly
def test_every_waiting_caller_gets_the_error(client_of, traffic):
    async def serve():
        client = client_of("async", step_s=0.01)
        await client.add_request(traffic.request("a", max_tokens=400))
        await client.get_outputs()
        os.kill(client.process_id, signal.SIGSTOP)  # the stopped process replies to no call
        waiting = [client.call_workers("echo", (n,)) for n in range(3)]
        waiting += [traffic.Answers().collect_async(client, 1) for _ in range(3)]
        tasks = [asyncio.create_task(item) for item in waiting]
        await asyncio.sleep(0.05)
        os.kill(client.process_id, signal.SIGKILL)
        start = time.monotonic()
        actual = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - start < 2
        assert [type(item) for item in actual] == [EngineDeadError] * 6
        assert isinstance(client.error, EngineDeadError)
        with pytest.raises(EngineDeadError):
            await client.add_request(traffic.request("b"))
        await client.abort_requests(["a"])

    asyncio.run(serve())


@pytest.mark.costly
def test_a_failed_step_stops_the_engine_and_the_error_contains_a_summary_of_the_plan(
    client_of, traffic
):
    client = client_of("sync", fails_at=3)
    client.add_request(traffic.request("secret", [77, 77, 77], 20))
    with pytest.raises(EngineDeadError, match="the chip melted") as caught:
        traffic.Answers().collect(client, 1)
    assert caught.value.digest.startswith("step 3: 1 scheduled requests")
    assert "77" not in str(caught.value) and "secret" not in str(caught.value)
    with pytest.raises(EngineDeadError):
        client.get_outputs()


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
@pytest.mark.parametrize("num_rounds", PARENTS)
def test_no_process_or_file_is_left_when_the_parent_is_killed(
    engine_config, traffic, tmp_path, tmp_path_factory, monkeypatch, num_rounds, stopped
):
    engine_config(has_child=1)
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    environment["TMPDIR"] = str(tmp_path_factory.mktemp("t"))
    monkeypatch.setattr("tempfile.tempdir", environment["TMPDIR"])
    before = traffic.open_resources()
    for number in range(num_rounds):
        parent = subprocess.Popen(
            [sys.executable, str(HERE / "orphan_parent.py"), str(tmp_path), str(number % 3)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            *processes, folder = parent.stdout.readline().split()
            if stopped:
                os.kill(int(processes[0]), signal.SIGSTOP)
        finally:
            parent.kill()
            parent.wait()
            parent.stdout.close()
        assert len(processes) == 2
        assert not any(traffic.is_running(int(pid)) for pid in processes)
        assert not Path(folder).exists()
    assert traffic.open_resources() == before
