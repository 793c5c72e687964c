"""Engine messages round-trip. Malformed messages are rejected and counted."""

from array import array
from random import Random
from typing import get_args

import msgspec
import pytest

from dovetail.errors import MessageError
from dovetail.interfaces import (
    EngineCoreOutputs,
    Finished,
    ModelInfo,
    PauseScope,
    SchedulerStats,
)
from dovetail.request import EngineCoreRequest, FinishReason
from dovetail.result import LogprobColumns
from dovetail.sampling_params import SamplingParams
from dovetail.transport import messages
from dovetail.transport.messages import (
    Answer,
    Call,
    Detach,
    Failed,
    FromEngine,
    Heartbeat,
    Hello,
    Message,
    MessageReader,
    Outputs,
    Ready,
    Stop,
    Taken,
    ToEngine,
    engine_reader,
    front_end_reader,
    pack,
)
from dovetail.transport.remote_error import RemoteError
from dovetail.transport.wire_types import read_request, wire_request

SEED = 20261121
COLUMNS = LogprobColumns(
    counts=array("i", [2, 1]),
    token_ids=array("i", [5, 6, 7]),
    logprobs=array("f", [-0.5, -1.0, -2.0]),
    ranks=array("i", [1, 3]),
)
OUTPUTS = EngineCoreOutputs(
    request_ids=["a", "b"],
    num_new_tokens=array("i", [2, 1]),
    token_ids=array("i", [5, 6, 7]),
    finished=(Finished(request_id="b", reason=FinishReason.STOP, stop_reason=7),),
    logprobs={"a": COLUMNS},
    prompt_logprobs={"b": COLUMNS},
    num_cached_tokens={"a": 3},
    stats=SchedulerStats(
        step_id=4,
        num_waiting=0,
        num_running=2,
        num_scheduled_tokens=2,
        kv_cache_usage=0.25,
        prefix_queries=3,
        prefix_hits=1,
        num_preemptions=0,
        num_recomputed_tokens=0,
        policy="FCFS",
    ),
)
REQUEST = EngineCoreRequest(
    request_id="a",
    prompt_token_ids=array("i", [1, 2]),
    sampling_params=SamplingParams(max_tokens=3),
    max_tokens=3,
)
TO_ENGINE = (
    Hello(),
    Call(0, "add_request", wire_request(REQUEST)),
    Taken(3),
    Detach(),
    Stop(),
)
FROM_ENGINE = (
    Ready(12, "{}", ModelInfo(vocab_size=9), 64),
    Outputs.of(OUTPUTS),
    Answer(4, b"result"),
    Answer(5, error=RemoteError("RequestError", "too long", "prompt")),
    Failed(RemoteError("EngineDeadError", "a step failed", "step 3: 2 scheduled requests")),
    Heartbeat(7, 1, PauseScope.NEW),
)


def read_all(reader, contents):
    """Return the number of rejected messages. Any other error fails the test."""
    num_rejected = 0
    for content in contents:
        try:
            assert isinstance(reader.read(content), Message)
        except MessageError:
            num_rejected += 1
    return num_rejected


def spoiled(rng, content):
    changed = bytearray(content)
    kind = rng.randrange(3)
    if kind == 0:
        for _ in range(rng.randint(1, 6)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    elif kind == 1:
        del changed[rng.randrange(len(changed)) :]
    else:
        changed[3:] = rng.randbytes(rng.randrange(60))
    return bytes(changed)


def test_every_message_type_has_a_test():
    assert {type(item) for item in TO_ENGINE} == set(get_args(ToEngine))
    assert {type(item) for item in FROM_ENGINE} == set(get_args(FromEngine))


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda item: type(item).__name__)
def test_messages_to_the_engine_round_trip(message):
    reader = engine_reader()
    assert reader.read(pack(message)) == message
    with pytest.raises(MessageError):
        front_end_reader().read(pack(message))


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda item: type(item).__name__)
def test_messages_to_the_front_end_round_trip(message):
    assert front_end_reader().read(pack(message)) == message
    with pytest.raises(MessageError):
        engine_reader().read(pack(message))


def test_outputs_and_requests_round_trip():
    assert front_end_reader().read(pack(Outputs.of(OUTPUTS))).columns() == OUTPUTS
    empty = EngineCoreOutputs()
    assert front_end_reader().read(pack(Outputs.of(empty))).columns() == empty
    assert read_request(engine_reader().read(pack(TO_ENGINE[1])).arguments) == REQUEST


@pytest.mark.parametrize(
    "change",
    [
        {"num_new_tokens": b"\1"},
        {"num_new_tokens": array("i", [2]).tobytes()},
        {"num_new_tokens": array("i", [4, -1]).tobytes()},
        {"token_ids": array("i", [5, 6]).tobytes()},
        {"logprobs": {"a": messages.WireLogprobs(b"", b"\1\0\0\0", b"", b"")}},
    ],
)
def test_inconsistent_outputs_are_rejected(change):
    forged = msgspec.structs.replace(Outputs.of(OUTPUTS), **change)
    with pytest.raises(MessageError):
        front_end_reader().read(pack(forged)).columns()


def test_ten_thousand_malformed_messages_are_rejected_and_counted():
    rng, reader = Random(SEED), engine_reader()
    valid = [pack(item) for item in TO_ENGINE]
    bad = [spoiled(rng, rng.choice(valid)) for _ in range(10_000)]
    num_rejected = read_all(reader, bad)
    assert reader.num_rejected == num_rejected > 5000
    assert read_all(reader, valid) == 0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"DV",
        b"DV\x02",
        b"DV\x01" + pack(Stop())[3:],
        b"XV\x02" + pack(Stop())[3:],
        pack(Stop()) + b"\0",
        b"DV\x02" + b"\x91" * 1_000_000,
        b"DV\x02\x91\xa7unknown",
        b"DV\x02\x92\xa4stop\x01",
        b"DV\x02\x92\xa5taken\xdd\xff\xff\xff\xff",
        b"DV\x02\x94\xa4call\x01\xa1x\xc7\x03\x2aabc",
        b"DV\x02" + msgspec.msgpack.encode(["call", 1, "pause", "some"]),
        b"DV\x02" + msgspec.msgpack.encode(["taken", 1.5]),
    ],
    ids=lambda content: content[:24].hex(),
)
def test_an_invalid_message_is_rejected(content):
    reader = engine_reader()
    with pytest.raises(MessageError):
        reader.read(content)
    assert reader.num_rejected == 1


def test_a_message_above_the_size_limit_is_not_parsed():
    reader = MessageReader(ToEngine, max_bytes=20)
    assert reader.read(pack(Taken(3))) == Taken(3)
    with pytest.raises(MessageError, match="limit is 20"):
        reader.read(pack(Call(0, "a", b"a" * 20)))


def test_values_other_than_plain_data_are_not_sent():
    with pytest.raises(MessageError, match="cannot be sent"):
        pack(Call(1, "run", print))
    with pytest.raises(MessageError, match="cannot be sent"):
        pack(Answer(2**70))
    with pytest.raises(MessageError, match="the limit is"):
        pack(Call(0, "a", bytes(messages.MAX_MESSAGE_BYTES)))


def test_a_pickle_in_a_message_field_is_never_loaded(tmp_path):
    import os
    import pickle

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "fired"),)

    bomb = pickle.dumps(Bomb())
    reader = engine_reader()
    offered = [bomb, b"DV\x02" + bomb, pack(Call(1, "run", bomb))]
    assert read_all(reader, offered) == 2
    with pytest.raises(MessageError):
        read_request(bomb)
    assert not (tmp_path / "fired").exists()
