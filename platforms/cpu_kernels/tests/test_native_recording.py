"""Native operations are recorded with their structs and replayed."""

import ctypes
import gc
import subprocess
import sys
import threading

import pytest
import torch

import dovetail_cpu_kernels as native
from dovetail_cpu_kernels.linear import BF16, PackedLinear, new_args, operation, pack
from dovetail_cpu_kernels.ops import OPS, op

pytestmark = pytest.mark.skipif(not native.status().available, reason=native.status().reason)

if native.status().available:
    from dovetail_cpu_kernels.recording import Recording


def gate_mul(x, y):
    """Call silu_mul through a struct that does not outlive the call."""
    args = OPS["silu_mul"](x.data_ptr(), y.data_ptr(), len(x), x.stride(0), y.stride(0), y.shape[1])
    op("silu_mul")(ctypes.addressof(args))


@pytest.fixture
def tensors():
    torch.manual_seed(3)
    return torch.randn(3, 64).bfloat16(), torch.empty(3, 32, dtype=torch.bfloat16)


@pytest.mark.costly
def test_a_replay_reads_the_current_contents_of_memory(tensors):
    x, y = tensors
    with Recording() as recording:
        gate_mul(x, y)
    gc.collect()
    assert recording.num_calls == 1
    first = y.clone()
    x.copy_(torch.randn(3, 64))
    recording.replay()
    expected = torch.empty_like(y)
    gate_mul(x, expected)
    assert torch.equal(y, expected)
    assert not torch.equal(y, first)


def test_operations_are_replayed_in_order():
    spec = PackedLinear(kind=BF16, N=32, K=32)
    memory = torch.zeros(spec.num_bytes + 64, dtype=torch.uint8)
    packed = -(-memory.data_ptr() // 64) * 64
    weight = torch.eye(32).bfloat16() * 2
    assert pack(spec, weight.data_ptr(), packed) == 0
    numbers = torch.ones(4, 1, 32, dtype=torch.bfloat16)
    with Recording() as recording:
        for number in range(3):
            args = new_args(spec, packed)
            args.x, args.y, args.M = numbers[number].data_ptr(), numbers[number + 1].data_ptr(), 1
            operation(BF16)(ctypes.addressof(args))
    assert recording.num_calls == 3
    assert numbers[:, 0, 0].tolist() == [1, 2, 4, 8]
    numbers[0] = 3
    recording.replay()
    assert numbers[:, 0, 0].tolist() == [3, 6, 12, 24]


def test_only_operations_of_the_recording_thread_are_recorded(tensors):
    x, y = tensors
    with Recording() as recording:
        other = threading.Thread(target=gate_mul, args=(x, y))
        other.start()
        other.join()
    gate_mul(x, y)
    assert recording.num_calls == 0
    recording.replay()


def test_a_recording_ends_at_the_end_of_its_with_block_even_after_an_error(tensors):
    x, y = tensors
    with pytest.raises(RuntimeError, match="enough"), Recording():
        gate_mul(x, y)
        raise RuntimeError("enough")
    with Recording() as recording:
        pass
    assert recording.num_calls == 0


TOO_LONG = """
import ctypes, resource
from pathlib import Path
from dovetail_cpu_kernels.ops import OPS, op
from dovetail_cpu_kernels.recording import Recording
call, args = op("silu_mul"), OPS["silu_mul"](0, 0, 0, 0, 0, 16)
address = ctypes.addressof(args)
status = Path("/proc/self/status").read_text()
used = int(status.split("VmSize:")[1].split()[0]) * 1024
recording = Recording()
try:
    with recording:
        resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20),) * 2)
        for _ in range(1_000_000):
            call(address)
except MemoryError as error:
    assert "memory to record a step" in str(error), error
    print("a typed error")
"""


@pytest.mark.costly
def test_a_recording_that_does_not_fit_in_memory_raises_a_memory_error():
    command = [sys.executable, "-c", TOO_LONG]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "a typed error\n", done.stderr


def test_results_do_not_depend_on_the_floating_point_mode_of_the_caller():
    """The product of sigmoid and gate is subnormal, but the result is not."""
    x = torch.full((64, 2048), 1.5e-38).bfloat16()
    expected = torch.empty(64, 1024, dtype=torch.bfloat16)
    x[:, 1024:] = 1e10
    gate_mul(x, expected)
    assert expected.count_nonzero() == expected.numel()
    try:
        native.set_num_threads(3)
        torch.set_flush_denormal(True)
        for _ in range(30):
            y = torch.empty_like(expected)
            gate_mul(x, y)
            assert torch.equal(y.view(torch.int16), expected.view(torch.int16))
            with Recording() as recording:
                gate_mul(x, y)
            y.zero_()
            recording.replay()
            assert torch.equal(y.view(torch.int16), expected.view(torch.int16))
    finally:
        torch.set_flush_denormal(False)
        native.set_num_threads(1)
