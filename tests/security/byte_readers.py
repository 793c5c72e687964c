"""Every function that reads bytes of another process or of a file, with valid bytes for it.

A reader does everything that the engine does to validate the bytes; it may reject them with a
Dovetail error. Model directories are tested separately, because the start of an engine reads them.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from security.hostile_pickles import Form, behind, columns, messagepack, raw, text

from dovetail.config import EngineArgs, EngineConfig, RequestedConfig
from dovetail.config.resolve import resolve
from dovetail.decision_log.header import LogHeader
from dovetail.decision_log.log_file import LogReader
from dovetail.engine.port import OPERATIONS
from dovetail.engine.process.boot import EngineBoot
from dovetail.errors import MessageError
from dovetail.executors.multiproc.worker_main import WorkerBoot
from dovetail.executors.worker_spec import WorkerSpec
from dovetail.interfaces import EngineCoreOutputs, KVCacheConfig, ModelInfo, SchedulerLimits
from dovetail.interfaces.engine_config import ExecutorConfig
from dovetail.interfaces.kv_cache import FullAttentionSpec, KVCacheGroup
from dovetail.interfaces.worker import GrammarOutput
from dovetail.plan import NewRequest, StepBuilder
from dovetail.processes.boot import Boot, read_boot
from dovetail.processes.child_process import error_of
from dovetail.processes.start_report import receive_report
from dovetail.request import EncoderInput, EngineCoreRequest
from dovetail.result import LogprobColumns, ModelRunnerOutput
from dovetail.sampling_params import SamplingParams
from dovetail.transport import messages
from dovetail.transport.ndarray import NDArray
from dovetail.transport.order_frame import (
    CallResult,
    WorkerCall,
    decode_call,
    decode_call_result,
    decode_sample,
    encode_call,
    encode_call_result,
    encode_sample,
)
from dovetail.transport.plan_frame import decode_plan, encode_plan
from dovetail.transport.remote_error import RemoteError
from dovetail.transport.result_frame import decode_result, encode_result
from dovetail.transport.ring import make_ring
from dovetail.transport.ring_memory import RingMemory, RingShape, anonymous_file
from dovetail.transport.wire_types import decode, encode, read_request, wire_request
from dovetail_cpu.packed_cache.packed_file import PackedEntry, read_packed, write_packed
from dovetail_devkit.fakes.platform import FakePlatform

SHAPE = RingShape(num_readers=1, num_slots=2, slot_bytes=1024)
KEY = {"weights": "of the test"}
PARAMS = SamplingParams(max_tokens=3, stop=["x"], logit_bias={1: 0.5}, extra_args={"deep": ["er"]})
LOGPROBS = LogprobColumns(
    counts=array("i", [1]),
    token_ids=array("i", [5]),
    logprobs=array("f", [-0.5]),
    ranks=array("i", [1]),
)


@dataclass(frozen=True, kw_only=True)
class ByteReader:
    """A function that reads external bytes.

    good: bytes that it accepts. read: the function. form: inserts a hostile pickle into `good` at
    several positions.
    """

    good: bytes
    read: Callable[[bytes], object]
    form: Form = raw


def _request() -> bytes:
    return wire_request(
        EngineCoreRequest(
            request_id="a",
            prompt_token_ids=array("i", [1, 2]),
            sampling_params=PARAMS,
            max_tokens=3,
            bad_words_token_ids=((1, 2),),
            encoder_inputs=(EncoderInput(position=0, num_tokens=1, content_hash=b"hash"),),
        )
    )


def _plan() -> bytes:
    builder = StepBuilder()
    builder.join(
        NewRequest(
            row=0,
            request_id="a",
            token_ids=array("i", [1, 2]),
            num_prompt_tokens=2,
            sampling_params=PARAMS,
            generation=0,
            stop_token_ids=frozenset({1}),
            bad_words_token_ids=((1, 2),),
            seed=0,
        )
    )
    builder.grow(0, [3])
    builder.run(0, 0, 2, samples=True)
    return encode_plan(builder.build())


def _result() -> bytes:
    return encode_result(
        ModelRunnerOutput(
            step_id=1,
            num_sampled=array("B", [1]),
            token_ids=array("i", [5]),
            logprobs={0: LOGPROBS},
            kv_transfer=b"moved",
        )
    )


def _outputs() -> messages.Outputs:
    return messages.Outputs.of(
        EngineCoreOutputs(
            request_ids=["a"],
            num_new_tokens=array("i", [1]),
            token_ids=array("i", [5]),
            logprobs={"a": LOGPROBS},
        )
    )


def _log_header() -> bytes:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    return LogHeader(
        scheduler="dovetail_sched_fcfs:FCFSScheduler",
        policy="",
        limits=SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=16),
        kv_cache=KVCacheConfig(num_blocks=4, groups=(KVCacheGroup(layer_names=("0",), spec=spec),)),
        seed=0,
        options={},
        policy_options={},
        strict=False,
    ).encode()


def _to_engine(content: bytes) -> None:
    message: Any = messages.engine_reader().read(content)
    if not isinstance(message, messages.Call) or message.operation not in OPERATIONS:
        raise MessageError("this is not a call")
    operation = OPERATIONS[message.operation]
    (*_, last) = operation.decode_arguments(message.arguments)
    if operation.takes_requests:
        for _, request in (last,) if operation.name == "add_request" else last:
            read_request(request)


def _from_engine(content: bytes) -> None:
    message: Any = messages.front_end_reader().read(content)
    if isinstance(message, messages.Outputs):
        message.columns()
    if isinstance(message, messages.Ready):
        EngineConfig.model_validate_json(message.config)


def _call_reader(name: str, arguments: tuple[object, ...]) -> ByteReader:
    """Return the reader of a message that calls the operation `name`.

    The message contains the arguments as bytes.
    """
    call = messages.Call(1, name, msgspec.msgpack.encode(arguments))
    return ByteReader(good=messages.pack(call), read=_to_engine, form=behind(3, messagepack))


def _answer(content: bytes) -> None:
    response = decode_call_result(content)
    if response.error is not None:
        response.error.error()


def _boot_record(content: bytes) -> None:
    descriptor = anonymous_file(len(content))
    os.pwrite(descriptor, content, 0)
    read_boot(descriptor)


def _engine_boot(content: bytes) -> None:
    RequestedConfig.model_validate_json(decode(content, EngineBoot).config)


def _worker_boot(content: bytes) -> None:
    ExecutorConfig.model_validate_json(decode(content, WorkerBoot).spec.config)


def _start_report(content: bytes) -> None:
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with own, other:
        other.send(content)
        report = receive_report(own)
        if report is not None and report.kind == "failed":
            error_of(report)


def _bell(content: bytes) -> None:
    writer, (index,) = make_ring(RingShape(num_readers=1))
    intruder = socket.socket(fileno=os.dup(index.descriptors[1]))
    with intruder, writer, index.take():
        intruder.send(content)
        writer.check_readers()


def _ring_frame(content: bytes) -> None:
    """Send the frame through the ring, or through a separate segment if it is long."""
    writer, (index,) = make_ring(RingShape(num_readers=1, slot_bytes=64))
    with writer, index.take() as reader:
        writer.send(content)
        assert reader.receive(timeout_s=5) == content
        decode_plan(content)


def _ring_memory(offset: int, content: bytes) -> None:
    """Read a frame of a ring after its memory was overwritten at `offset`."""
    descriptor = anonymous_file(SHAPE.num_bytes)
    try:
        RingMemory.format(descriptor, SHAPE).close()
        os.pwrite(descriptor, content, offset)
        memory = RingMemory.attach(descriptor)
        actual = memory.read(0)
        memory.close()
    finally:
        os.close(descriptor)
    if offset and actual is None:
        raise MessageError("this is not a frame")


def _good_ring_memory(offset: int) -> bytes:
    descriptor = anonymous_file(SHAPE.num_bytes)
    try:
        memory = RingMemory.format(descriptor, SHAPE)
        memory.write(0, b"frame")
        memory.close()
        return os.pread(descriptor, 48, offset)
    finally:
        os.close(descriptor)


def _packed_file(content: bytes) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        read_packed(file.fileno(), KEY, num_threads=1)


def _good_packed_file() -> bytes:
    with tempfile.TemporaryFile() as file:
        write_packed(file.fileno(), KEY, [PackedEntry(name="layer", form=memoryview(b"weights"))])
        file.seek(0)
        return file.read()


def _log_file(content: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        for record in LogReader(Path(file.name)):
            LogHeader.decode(record.payload)


def _engine_readers() -> dict[str, ByteReader]:
    config = EngineArgs(model="demo").create_engine_config().model_dump_json()
    wire = behind(3, messagepack)
    boot = EngineBoot(config, "/tmp", 1.0)
    to_engine = (
        ("add_request", (("a", _request()),)),
        ("add_requests", ((("a", _request()),),)),
        ("abort_requests", (("a",),)),
        ("call_workers", ("get_model_info", (1, "x"), {"deep": {"er": True}})),
    )
    from_engine = (
        messages.Ready(12, _resolved().model_dump_json(), ModelInfo(vocab_size=9), 64),
        _outputs(),
        messages.Answer(4, msgspec.msgpack.encode([{"vocab_size": 9}])),
        messages.Failed(RemoteError("EngineDeadError", "a step failed", "2 runs")),
    )
    by_name = {
        f"from the engine: {type(item).__name__}": ByteReader(
            good=messages.pack(item), read=_from_engine, form=wire
        )
        for item in from_engine
    }
    by_name |= {
        f"to the engine: {name}": _call_reader(name, arguments) for name, arguments in to_engine
    }
    return by_name | {
        "a request": ByteReader(good=_request(), read=read_request, form=messagepack),
        "an engine's boot": ByteReader(good=encode(boot), read=_engine_boot, form=messagepack),
        "a configuration": ByteReader(
            good=config.encode(), read=RequestedConfig.model_validate_json, form=text
        ),
    }


def _resolved() -> EngineConfig:
    return resolve(EngineArgs(model="demo").create_engine_config(), FakePlatform())


def _worker_readers() -> dict[str, ByteReader]:
    config = _resolved().executor_config().model_dump_json()
    spec = WorkerSpec(
        config=config,
        platform="cpu",
        worker="cpu",
        worker_options={"deep": ["er"]},
        rank=0,
        local_rank=0,
        world_size=1,
    )
    boot = WorkerBoot(
        spec=spec, commands=(3, 4), responses=(5, 6), reports_transfers=False, phase_timeout_s=1
    )
    call = WorkerCall(
        number=1,
        operation="get_model_info",
        args=[1, "x", NDArray("uint8", (2,), b"ab"), ModelInfo(vocab_size=9)],
        kwargs={"deep": {"er": None}},
    )
    error = RemoteError("ModelError", "no", "x")
    frames = {
        "a plan": (_plan(), decode_plan),
        "a result": (_result(), decode_result),
        "a grammar": (
            encode_sample(GrammarOutput(runs=(0,), bitmask=b"\1\0\0\0")),
            decode_sample,
        ),
        "a call": (encode_call(call), decode_call),
        "an answer": (encode_call_result(CallResult(number=1, value=[{"a": 1}])), _answer),
        "an error": (encode_call_result(CallResult(number=1, error=error)), _answer),
    }
    by_name = {
        name: ByteReader(good=valid, read=read, form=columns)
        for name, (valid, read) in frames.items()
    }
    return by_name | {
        "a worker's boot": ByteReader(good=encode(boot), read=_worker_boot, form=messagepack),
    }


def _shared_readers() -> dict[str, ByteReader]:
    slot = SHAPE.first_slot
    boot = Boot(
        entry="a:b",
        parent_pid=1,
        control=3,
        liveness=4,
        folder="",
        sys_path=["a"],
        descriptors=[5],
        logs="",
        settings=b"",
    )
    report = json.dumps(["failed", "ModelError", "no", "x"]).encode()
    return {
        "a boot record": ByteReader(good=boot.encode(), read=_boot_record, form=text),
        "a start report": ByteReader(good=report, read=_start_report, form=text),
        "a wakeup socket": ByteReader(good=b"!", read=_bell),
        "a ring": ByteReader(good=_plan(), read=_ring_frame),
        "a ring's header": ByteReader(good=_good_ring_memory(0), read=partial(_ring_memory, 0)),
        "a ring's slot": ByteReader(good=_good_ring_memory(slot), read=partial(_ring_memory, slot)),
    }


def _file_readers() -> dict[str, ByteReader]:
    return {
        "packed weights": ByteReader(good=_good_packed_file(), read=_packed_file),
        "a decision log": ByteReader(good=b"dovetail decisions 1\n", read=_log_file),
        "a decision log's header": ByteReader(good=_log_header(), read=LogHeader.decode, form=text),
    }


def byte_readers() -> dict[str, ByteReader]:
    """Return all readers by name."""
    return _engine_readers() | _worker_readers() | _shared_readers() | _file_readers()
