"""Serialized values, arrays, errors and worker messages: round trips and rejected data."""

import os
import pickle
from array import array
from random import Random

import pytest

from dovetail.errors import (
    CapacityError,
    DovetailError,
    EngineDeadError,
    MessageError,
    RequestError,
    WeightError,
)
from dovetail.interfaces import GrammarOutput, ModelInfo
from dovetail.interfaces.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    LatentAttentionSpec,
    NoCacheSpec,
    StateSpec,
)
from dovetail.transport.columns import frame_kind
from dovetail.transport.ndarray import ELEMENT_BYTES, NDArray
from dovetail.transport.order_frame import (
    ANSWER,
    CALL,
    SAMPLE,
    CallResult,
    WorkerCall,
    decode_call,
    decode_call_result,
    decode_sample,
    encode_call,
    encode_call_result,
    encode_sample,
)
from dovetail.transport.remote_error import RemoteError
from dovetail.transport.values import pack_value, unpack_value
from dovetail.transport.wire_types import decode, encode

SEED = 20261121
FULL = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="float32")
LATENT = LatentAttentionSpec(
    block_size=4, num_kv_heads=1, head_size=8, dtype="float32", value_size=5
)
RECORDS = [
    ModelInfo(vocab_size=7, max_model_len=5, supported_tasks=("generate", "embed")),
    {"layers.0": FULL, "layers.1": NoCacheSpec(block_size=4), "layers.2": LATENT},
    KVCacheConfig(
        num_blocks=9,
        groups=(
            KVCacheGroup(layer_names=("a", "b"), spec=FULL),
            KVCacheGroup(layer_names=(), spec=StateSpec(block_size=4, num_bytes=3, snapshots=True)),
        ),
    ),
]


class Bomb:
    """A pickle that creates a directory when it is loaded."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("value", RECORDS, ids=lambda value: type(value).__name__)
def test_the_data_classes_of_the_contracts_round_trip(value):
    assert unpack_value(pack_value([value])) == [value]


def test_plain_data_round_trips_and_tuples_become_lists():
    value = [None, True, 2**63, -1, 0.5, "ü", b"\0", {"a": {1: []}}]
    assert unpack_value(pack_value(value)) == value
    assert unpack_value(pack_value(((1, {2}), frozenset()))) == [[1, [2]], []]


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_arrays_of_every_type_round_trip(dtype):
    sent = NDArray(dtype, (2, 3), bytes(range(6)) * ELEMENT_BYTES[dtype])
    actual = unpack_value(pack_value({"x": sent}))["x"]
    assert actual == sent and actual.memory().nbytes == 6 * ELEMENT_BYTES[dtype]


def test_an_object_with_a_buffer_is_sent_as_an_array():
    actual = unpack_value(pack_value([array("d", [1.5, 2]), memoryview(b"ab"), array("l", [7])]))
    assert [(item.dtype, item.shape) for item in actual] == [
        ("float64", (2,)),
        ("uint8", (2,)),
        ("int64", (1,)),
    ]
    assert actual[0].memory().tolist() == [1.5, 2.0]


def test_numpy_arrays_of_any_memory_order_round_trip():
    numpy = pytest.importorskip("numpy")
    matrix = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    for sent in (matrix, matrix.T, matrix[:, ::2], numpy.float32(3), matrix[:0]):
        actual = unpack_value(pack_value(sent))
        assert numpy.array_equal(numpy.asarray(actual.memory()).reshape(actual.shape), sent)


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [
        ("object", (1,), b"\0" * 8),
        ("float32", (2,), b"\0" * 7),
        ("float32", (-1, -1), b"\0" * 4),
        ("bool", (1,) * 33, b"\0"),
    ],
)
def test_inconsistent_arrays_are_rejected(dtype, shape, data):
    with pytest.raises(MessageError):
        NDArray(dtype, shape, data)


def loop():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value",
    [object(), print, Bomb, 1j, 2**64, loop(), {(): 1}, array("u", "a"), Exception("x")],
    ids=lambda value: type(value).__name__,
)
def test_values_that_cannot_be_serialized_are_rejected_before_sending(value):
    with pytest.raises(MessageError, match="cannot be sent"):
        pack_value(value)


def test_only_known_records_with_valid_fields_are_constructed():
    valid = pack_value(ModelInfo(vocab_size=7))
    for before, after in (
        (b"ModelInfo", b"ModelInfa"),
        (b"ModelInfo", b"NDArray__"),
        (b"vocab_size", b"vocab_sizE"),
        (b"\x07", b"\xc3"),
        (b"\x91\xa8generate", b"\xa9Xgenerate"),
    ):
        assert before in valid
        with pytest.raises(MessageError):
            unpack_value(valid.replace(before, after))


def test_worker_messages_round_trip():
    grammar = GrammarOutput(runs=(0, 3), bitmask=b"\1\0\0\0\2\0\0\0")
    assert decode_sample(encode_sample(grammar)) == grammar
    assert decode_sample(encode_sample(None)) is None
    call = WorkerCall(number=7, operation="a:b", args=[1, FULL], kwargs={"x": b""}, reply_rank=2)
    assert decode_call(encode_call(call)) == call
    assert decode_call(encode_call(WorkerCall(number=1, operation="f"))).reply_rank is None
    for response in (
        CallResult(number=3, value={"y": [1]}),
        CallResult(number=4),
        CallResult(number=5, error=RemoteError.of(CapacityError("full"))),
    ):
        assert decode_call_result(encode_call_result(response)) == response
    kinds = (encode_sample(None), encode_call(call), encode_call_result(CallResult(number=3)))
    assert [frame_kind(frame) for frame in kinds] == [SAMPLE, CALL, ANSWER]


def test_mutated_worker_messages_are_rejected_or_valid(tmp_path):
    """The result is a message or a MessageError, and no pickle is loaded."""
    rng = Random(SEED)
    bomb = pickle.dumps(Bomb(tmp_path / "fired"))
    call = WorkerCall(number=1, operation="f", args=[FULL, NDArray("int8", (2,), b"ab"), bomb])
    readers = (
        (decode_sample, encode_sample(GrammarOutput(runs=(1,), bitmask=b"abcd"))),
        (decode_call, encode_call(call)),
        (decode_call_result, encode_call_result(CallResult(number=2, value=[RECORDS[2]]))),
        (decode_call_result, encode_call_result(CallResult(number=2, error=RemoteError("", "x")))),
    )
    num_rejected = 0
    for _ in range(3000):
        read, frame = rng.choice(readers)
        mutant = bytearray(frame)
        for _ in range(rng.randint(1, 3)):
            mutant[rng.randrange(len(mutant))] = rng.randrange(256)
        mutant = rng.choice((mutant, mutant[: rng.randrange(len(mutant))], mutant + bomb, bomb))
        try:
            read(bytes(mutant))
        except MessageError:
            num_rejected += 1
    assert num_rejected > 2000
    assert not (tmp_path / "fired").exists()


class OwnError(WeightError):
    """A plugin's subclass of a Dovetail error."""


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (CapacityError("full"), CapacityError, "w: full"),
        (OwnError("torn"), WeightError, "w: torn"),
        (KeyError("k"), DovetailError, "w: KeyError: 'k'"),
        (RequestError("no", parameter="top_k"), RequestError, "w: no"),
        (EngineDeadError("dead", digest="step 3"), EngineDeadError, "w: dead\nstep 3"),
        (SystemExit(2), DovetailError, "w: SystemExit: 2"),
    ],
)
def test_dovetail_errors_keep_their_class(error, kind, text):
    message = decode(encode(RemoteError.of(error)), RemoteError).error("w")
    assert type(message) is kind and str(message) == text
    assert getattr(message, "parameter", "") == getattr(error, "parameter", "")
    assert getattr(message, "digest", "") == getattr(error, "digest", "")


@pytest.mark.parametrize("kind", ["nearest", "Iterable", "__builtins__", "SystemExit", ""])
def test_a_remote_error_can_only_create_error_classes_of_dovetail(kind):
    assert type(RemoteError(kind, "x").error()) is DovetailError
