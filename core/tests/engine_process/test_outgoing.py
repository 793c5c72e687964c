"""Outputs of any size are sent to the front end, with flow control."""

import asyncio
import time
from array import array
from contextlib import contextmanager
from random import Random

import pytest

from dovetail.engine.process import outgoing
from dovetail.engine.process.factory import make_client
from dovetail.engine.process.outgoing import OutputWindow, pack_outputs
from dovetail.errors import MessageError
from dovetail.interfaces import EngineCoreOutputs, Finished, SchedulerStats
from dovetail.request import FinishReason
from dovetail.result import LogprobColumns
from dovetail.transport import messages
from dovetail.transport.messages import Answer, front_end_reader

STATS = SchedulerStats(
    step_id=1,
    num_waiting=0,
    num_running=1,
    num_scheduled_tokens=1,
    kv_cache_usage=0.5,
    prefix_queries=0,
    prefix_hits=0,
    num_preemptions=0,
    num_recomputed_tokens=0,
)


def log_probabilities(rng, num_positions, num_entries):
    num = num_positions * num_entries
    return LogprobColumns(
        counts=array("i", [num_entries] * num_positions),
        token_ids=array("i", [rng.randrange(1000) for _ in range(num)]),
        logprobs=array("f", [-rng.random() for _ in range(num)]),
        ranks=array("i", [1] * num_positions),
    )


def joined(parts):
    """Join the log-probabilities of chunks by request."""
    by_name = {}
    for name, item in parts:
        tokens, ranks = by_name.setdefault(name, ([], []))
        tokens += list(zip(item.token_ids, item.logprobs, strict=True))
        ranks += list(zip(item.counts, item.ranks, strict=True))
    return by_name


@pytest.mark.parametrize("heavy", ["prompt", "rows", "endings", "ids"])
def test_outputs_of_any_size_are_split_into_messages_within_the_limit(monkeypatch, heavy):
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 4096)
    rng = Random(heavy)
    names = [f"r{n}".ljust(300 if heavy == "ids" else 1) for n in range(40)]
    prompts = {"r0": log_probabilities(rng, 200, 30)} if heavy == "prompt" else {}
    rows = {name: log_probabilities(rng, 1, 40) for name in names} if heavy == "rows" else {}
    reason = "so it is " * (50 if heavy == "endings" else 1)
    ends = [Finished(request_id=n, reason=FinishReason.ERROR, message=reason) for n in names]
    outputs = EngineCoreOutputs(
        request_ids=names,
        num_new_tokens=array("i", [1] * len(names)),
        token_ids=array("i", range(len(names))),
        finished=tuple(ends),
        prompt_logprobs=prompts,
        logprobs=rows,
        num_cached_tokens=dict.fromkeys(names, 3),
        stats=STATS,
    )
    frames = list(pack_outputs(outputs, (Answer(7, b"yes"),)))
    assert len(frames) > 2 and max(map(len, frames)) <= 4096
    reader = front_end_reader()
    actual = [reader.read(frame) for frame in frames]
    assert [response.number for entry in actual for response in entry.responses] == [7]
    pieces = [entry.columns() for entry in actual]
    assert [piece.stats for piece in pieces][-1] == STATS
    assert sum(piece.stats is not None for piece in pieces) == 1
    assert [name for piece in pieces for name in piece.request_ids] == names
    assert [token for piece in pieces for token in piece.token_ids] == list(range(40))
    assert sorted(e.request_id for p in pieces for e in p.finished) == sorted(names)
    for field in ("prompt_logprobs", "logprobs"):
        parts = [item for piece in pieces for item in getattr(piece, field).items()]
        assert joined(parts) == joined(getattr(outputs, field).items())
    assert {n: c for p in pieces for n, c in p.num_cached_tokens.items()} == dict.fromkeys(names, 3)


def test_small_outputs_are_sent_as_one_message():
    (frame,) = pack_outputs(EngineCoreOutputs(stats=STATS))
    assert front_end_reader().read(frame).columns() == EngineCoreOutputs(stats=STATS)


def test_unacknowledged_messages_are_limited_in_number_and_size(monkeypatch):
    monkeypatch.setattr(outgoing, "MAX_UNREAD_BYTES", 1000)
    window = OutputWindow()
    for _ in range(outgoing.MAX_UNREAD_MESSAGES):
        assert not window.is_full
        window.sent(1)
    assert window.is_full
    window.taken(1)
    assert not window.is_full
    window.taken(10**9)
    # A few unacknowledged messages never fill the flow-control window.
    for _ in range(outgoing.ACKNOWLEDGE_EVERY):
        assert not window.is_full
        window.sent(500)
    assert window.is_full
    window.taken(outgoing.ACKNOWLEDGE_EVERY)
    assert not window.is_full


def collect_all(results, client, num_ends):
    """Return tokens, finish reasons and log-probabilities of prompts."""
    prompts = []
    while len(results.ends) < num_ends:
        outputs = client.get_outputs(5)
        assert outputs is not None or client.error is None
        if outputs is not None:
            results.take(outputs)
            prompts += outputs.prompt_logprobs.items()
    return results.tokens, results.ends, joined(prompts)


@contextmanager
def closing(client):
    yield client
    client.shutdown()


@pytest.mark.costly
def test_requests_continue_if_their_outputs_exceed_the_message_limit(
    client_of, engine_config, parts, traffic
):
    """One request has prompt log-probabilities in many messages. The other requests have none."""
    requests = [
        traffic.request("prompt", range(90), 30, prompt_logprobs=20),
        traffic.request("rows", range(30), 30, logprobs=20),
        *traffic.random_requests(),
    ]
    collected = []
    for kind, worker in (("inproc", parts.ControlledWorker), ("sync", parts.SmallMessageWorker)):
        config = engine_config(async_scheduling=kind == "sync")
        changed = config.model_copy(
            update={
                "parallel": config.parallel.model_copy(update={"worker_cls": worker}),
                "scheduler": config.scheduler.model_copy(update={"max_num_batched_tokens": 512}),
            }
        )
        with closing(make_client(changed, kind)) as client:
            assert client.add_requests(requests) == {}
            collected.append(collect_all(traffic.Answers(), client, len(requests)))
    assert collected[0] == collected[1]
    assert len(collected[1][2]["prompt"][1]) == 89


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize("ahead", [False, True], ids=["depth1", "depth2"])
def test_an_engine_waits_for_a_front_end_that_does_not_read(client_of, traffic, ahead):
    client = client_of("sync", async_scheduling=ahead)
    client.add_requests(
        [traffic.request("a", max_tokens=400), traffic.request("b", max_tokens=400)]
    )
    time.sleep(0.5)
    client.abort_requests(["b"])  # calls return while the engine waits
    assert len(client._outputs) <= outgoing.MAX_UNREAD_MESSAGES + 2
    assert client.progress.age_s < 0.5 and client.error is None
    tokens, ends = traffic.Answers().collect(client, 1)
    assert len(tokens["a"]) == 400 and set(ends) == {"a"}


@pytest.mark.costly
def test_the_engine_waits_for_a_blocked_event_loop_and_loses_no_output(client_of, traffic):
    async def serve():
        client = client_of("async", async_scheduling=True)
        names = [f"r{n}" for n in range(8)]
        for name in names:
            await client.add_request(traffic.request(name, max_tokens=400))
        results = traffic.Answers()
        results.take(await asyncio.wait_for(client.get_outputs(), 10))
        time.sleep(0.8)  # this call blocks the event loop
        queued = len(client._outputs)
        assert client.progress.age_s < 0.5
        assert queued <= outgoing.MAX_UNREAD_MESSAGES + 1, "the engine did not wait"
        while (outputs := client.get_queued_outputs()) is not None:
            results.take(outputs)
        await client.abort_requests(["r0"])
        await results.collect_async(client, 7)
        return queued, results

    queued, results = asyncio.run(serve())
    assert queued >= outgoing.ACKNOWLEDGE_EVERY
    assert {name: len(results.tokens[name]) for name in results.ends} == {
        f"r{n}": 400 for n in range(1, 8)
    }


def test_a_message_that_cannot_be_split_is_an_error(monkeypatch):
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 256)
    ending = Finished(request_id="a", reason=FinishReason.ERROR, message="x" * 1000)
    with pytest.raises(MessageError):
        list(pack_outputs(EngineCoreOutputs(finished=(ending,))))
