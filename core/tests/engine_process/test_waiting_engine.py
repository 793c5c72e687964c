"""An engine in which all requests wait uses little CPU time and sends no messages."""

import os
import time
from pathlib import Path

import pytest

WATCH_S = 0.5
PROMPT = list(range(40))


@pytest.fixture(params=["inproc", "sync"])
def waiting(request, client_of, parts, traffic):
    """Start an engine with a request that waits: `waiting("gate", ahead=False)`."""

    def make(blocker, *, ahead=False, timeout_s=60.0):
        scheduler_cls = {"gate": parts.NeverOpens, "load": parts.NeverLoads}[blocker]
        client = client_of(
            request.param,
            async_scheduling=ahead,
            options={"scheduler_cls": scheduler_cls, "kv_transfer_timeout_s": timeout_s},
        )
        client.expected = None
        if blocker == "load":
            client.add_request(traffic.request("first", PROMPT))
            client.expected = traffic.Answers().collect(client, 1)[0]["first"]
            assert client.reset_prefix_cache()
        client.add_request(traffic.request("held", PROMPT))
        return client

    return make


def cpu_s(client):
    """Return the CPU seconds that the engine's thread, or process, has used."""
    if client.process_id == os.getpid():
        return time.thread_time()
    fields = Path(f"/proc/{client.process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def watch(client):
    """Read outputs for `WATCH_S` seconds. Return the number of messages with outputs."""
    num_news, end = 0, time.monotonic() + WATCH_S
    while time.monotonic() < end:
        outputs = client.get_outputs(0.05)
        if outputs is not None and (client.process_id != os.getpid() or outputs.request_ids):
            num_news += 1
    return num_news


@pytest.mark.costly
@pytest.mark.sampled(8)
@pytest.mark.parametrize(("blocker", "ahead"), [("gate", False), ("load", True)])
def test_an_engine_whose_requests_only_wait_uses_little_cpu(waiting, blocker, ahead):
    client = waiting(blocker, ahead=ahead)
    watch(client)
    before_s, steps = cpu_s(client), client.progress.num_steps
    assert watch(client) == 0
    assert cpu_s(client) - before_s < 0.3 * WATCH_S
    # A process reports its steps once a second.
    assert client.progress.num_steps - steps <= 200 * (WATCH_S + 1)


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize("blocker", ["gate", "load"])
def test_a_waiting_request_delays_no_other_request_and_can_be_aborted(waiting, traffic, blocker):
    client = waiting(blocker)
    for _ in range(20):
        client.get_outputs(0.01)
    client.add_request(traffic.request("other", [7, 8, 9], 60))
    outputs, steps = traffic.Answers(), client.progress.num_steps
    outputs.collect(client, 1)
    assert len(outputs.tokens["other"]) == 60
    assert client.progress.num_steps - steps <= 70  # nearly every step produces one token
    client.abort_requests(["held"])
    client.add_request(traffic.request("other", [7, 8, 9], 60))
    assert traffic.Answers().collect(client, 1)[0] == {"other": outputs.tokens["other"]}


@pytest.mark.costly
def test_blocks_are_computed_if_their_load_never_ends(waiting, traffic):
    client = waiting("load", timeout_s=0.2)
    results, end = traffic.Answers(), time.monotonic() + 20
    while not results.ends and time.monotonic() < end:
        if (outputs := client.get_outputs(0.05)) is not None:
            results.take(outputs)
    assert results.tokens["held"] == client.expected


@pytest.mark.costly
def test_an_in_process_engine_does_not_spin_during_a_pause_of_all_requests(client_of, traffic):
    client = client_of("inproc")
    client.add_request(traffic.request("a"))
    client.pause("all")
    statistics = client.get_outputs(0.2)
    assert not statistics.request_ids
    begin = time.thread_time()
    for _ in range(20):
        assert client.get_outputs(0.2) is None
    assert time.thread_time() - begin < 0.1
    client.resume()
    assert traffic.Answers().collect(client, 1)[0]["a"]
