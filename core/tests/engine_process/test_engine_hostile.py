"""Malformed bytes sent to an engine's socket neither crash the engine nor execute code."""

import os
import pickle
from random import Random

import msgspec
import pytest
import zmq

from dovetail.engine.port import OPERATIONS
from dovetail.errors import MessageError
from dovetail.interfaces import PauseScope
from dovetail.transport.messages import (
    MAX_MESSAGE_BYTES,
    Call,
    Stop,
    engine_reader,
    pack,
)
from dovetail.transport.wire_types import wire_request

NUM_MESSAGES = 10_000
HUGE = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x91" * 9999)


def valid_messages(traffic):
    """Return one message of each type except Stop."""
    add = wire_request(traffic.request("evil", [5] * 20, 3, stop_token_ids=[1], logprobs=2))
    return [
        call(0, "add_request", ("evil", add)),
        call(1, "add_requests", (("evil", add), ("worse", add))),
        call(1, "abort_requests", ("nobody", "evil")),
        call(1, "pause", PauseScope.NEW),
        call(1, "resume"),
        call(1, "reset_prefix_cache"),
        call(1, "call_workers", "echo", (1, "x"), {"deep": [None]}),
    ]


def call(number, name, *arguments):
    """Return the message that calls an operation. Its arguments may be invalid."""
    return pack(Call(number, name, msgspec.msgpack.encode(arguments)))


def mutated(rng, content):
    """Return a copy of a message with changed, missing or repeated bytes, or a wrong version."""
    changed = bytearray(content)
    kind = rng.randrange(5)
    if kind == 0:
        for _ in range(rng.randint(1, 6)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    elif kind == 1:
        del changed[rng.randrange(len(changed)) :]
    elif kind == 2:
        index = rng.randrange(len(changed))
        changed[index:index] = changed[index : index + rng.randint(1, 40)]
    elif kind == 3:
        changed[2] = rng.choice([0, 1, *range(3, 256)])
    else:
        index = rng.randrange(3, len(changed))
        changed[index : index + 1] = rng.choice(HUGE)
    return bytes(changed)


def with_pickles(traffic, bomb):
    """Yield messages with a pickle as the message, as its body and in every bytes or str field."""
    text = bomb.decode("latin-1")
    request = traffic.request(text, [1, 2], extra_args={"x": bomb, text: [text]})
    fields = msgspec.msgpack.decode(wire_request(request))
    spoilt = [msgspec.msgpack.encode(fields | {name: bomb}) for name in fields]
    spoilt += [msgspec.msgpack.encode(fields | {name: text}) for name in fields]
    params = fields["sampling_params"]
    spoilt += [
        msgspec.msgpack.encode(fields | {"sampling_params": params | {name: bomb}})
        for name in params
    ]
    return [
        bomb,
        b"DV\x02" + bomb,
        b"DV\x02" + msgspec.msgpack.encode(bomb),
        b"DV\x02" + msgspec.msgpack.encode(msgspec.msgpack.Ext(42, bomb)),
        call(0, "add_request", (text, wire_request(request))),
        call(1, "abort_requests", (text,)),
        pack(Call(1, text, bomb)),
        pack(Call(1, "call_workers", bomb)),
        *(call(0, "add_request", (text, item)) for item in [bomb, *spoilt]),
        *(
            call(1, "call_workers", name, (bomb,), {"x": bomb})
            for name in (text[:250], "echo", "__reduce__", "os:mkdir", "pickle")
        ),
        *(b"DV\x02" + msgspec.msgpack.encode([bomb, 1]) for _ in range(3)),
    ]


def num_rejected(contents):
    """Return the number of messages that an engine must reject as invalid."""
    reader, count = engine_reader(), 0
    for content in contents:
        try:
            message = reader.read(content)
            if isinstance(message, Call):
                OPERATIONS[message.operation].decode_arguments(message.arguments)
        except (MessageError, KeyError):
            count += 1
    return count


@pytest.mark.sampled(4)
@pytest.mark.parametrize("ahead", [False, True], ids=["depth1", "depth2"])
def test_malformed_messages_do_not_affect_requests(client_of, traffic, tmp_path, ahead):
    class RaisesOnPickle:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "fired"),)

    rng = Random(traffic.SEED)
    valid = valid_messages(traffic)
    offered = with_pickles(traffic, pickle.dumps(RaisesOnPickle()))
    while len(offered) < NUM_MESSAGES // 2:
        is_random = rng.random() < 0.3
        offered.append(rng.randbytes(50) if is_random else mutated(rng, rng.choice(valid)))
    offered = [item for item in offered if item != pack(Stop())]
    client = client_of("sync", async_scheduling=ahead)
    standard = traffic.request("standard", range(30), 20)
    client.add_request(standard)
    expected = traffic.Answers().collect(client, 1)
    num_expected = num_rejected(offered)
    assert len(offered) // 2 < num_expected < len(offered)
    with traffic.raw_front_end(client.address) as (evil, _):
        for content in offered:
            evil.send(content)
        while client.progress.num_rejected < num_expected:
            client.get_outputs(1.1)
    assert client.progress.num_rejected == num_expected
    client.resume()  # a random message can be a valid request to pause
    client.add_request(standard)
    assert only("standard", *traffic.Answers().collect_until(client, "standard")) == expected
    assert not (tmp_path / "fired").exists()


def only(name, tokens, ends):
    return {name: tokens[name]}, {name: ends[name]}


def test_a_message_above_the_size_limit_is_rejected_before_it_is_read(client_of, traffic):
    client = client_of("sync")
    with zmq.Context() as context, context.socket(zmq.DEALER) as evil:
        evil.setsockopt(zmq.RECONNECT_IVL, -1)
        evil.connect(f"ipc://{client.address}")
        with evil.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            evil.send(bytes(MAX_MESSAGE_BYTES + 1))
            assert monitor.poll(5000), "the message was accepted"
            evil.disable_monitor()
        evil.close(linger=0)
    client.add_request(traffic.request("standard"))
    assert len(traffic.Answers().collect(client, 1)[0]["standard"]) == 5
    assert client.progress.num_rejected == 0
