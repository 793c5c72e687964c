"""Native operations are recorded with their structs and replayed."""

import ctypes
import gc
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


def test_a_recording_ends_with_its_block_even_after_an_error(tensors):
    x, y = tensors
    with pytest.raises(RuntimeError, match="enough"), Recording():
        gate_mul(x, y)
        raise RuntimeError("enough")
    with Recording() as recording:
        pass
    assert recording.num_calls == 0
