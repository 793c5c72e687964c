"""An operation that cannot allocate memory raises an error with its name, and can be called again.

A child process fills its address space, calls an operation, makes room and calls it again.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

import dovetail_cpu_kernels as native

pytestmark = [
    pytest.mark.skipif(not native.status().available, reason=native.status().reason),
    pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS limits memory on Linux only"),
]

CHILD = """
import ctypes, resource, sys
import dovetail_cpu_kernels as native
from dovetail_cpu_kernels import attention, linear, recording

name, num_threads = sys.argv[1], int(sys.argv[2])
native.set_num_threads(num_threads)
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
PIECE = 16 << 10
memory = lambda num_bytes: native.library().dk_alloc(num_bytes)

def fill():
    "Leave no room for PIECE bytes; return what was allocated."
    pages = int(open("/proc/self/statm").read().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), hard))
    taken = []
    while piece := libc.malloc(PIECE):
        taken.append(piece)
    return taken

def make_room(taken):
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    for piece in taken:
        libc.free(piece)

def ones(count):
    address = memory(count * 2)
    (ctypes.c_uint16 * count).from_address(address)[:] = [0x3F80] * count
    return address

if name == "attention":
    T, H, K, D = 96, 8, 2, 256
    q, k, v, out = ones(T * H * D), ones(T * K * D), ones(T * K * D), memory(T * H * D * 2)
    size = attention.AttentionBatchSize(1, T)
    start, lens = (ctypes.c_int32 * 2)(0, T), (ctypes.c_int32 * 1)(T)
    table = (ctypes.c_int32 * 6)(*range(6))
    slots = (ctypes.c_int64 * T)(*range(T))
    block = attention.attention_block_bytes(K, D, 16, attention.CACHE_BF16)
    args = attention.AttentionArgs(
        q, k, v, out, H * D, D, K * D, D, K * D, D, H * D, D, memory(6 * block), block,
        ctypes.addressof(size), ctypes.addressof(start), ctypes.addressof(lens),
        ctypes.addressof(table), ctypes.addressof(slots), 6, None, 0, H, K, D, 0, 16,
        attention.CACHE_BF16, 0, 0.1, 0.0)
    function, num_outputs = attention.attention_operation(), T * H * D
else:
    M, N, K = 64, 64, 8192
    shape = linear.PackedLinear(kind=getattr(linear, name.upper()), N=N, K=K, group=32)
    packed = memory(shape.num_bytes)
    assert linear.pack(shape, ones(N * K), packed) == 0
    args = linear.new_args(shape, packed)
    out = memory(M * N * 2)
    args.x, args.y, args.M = ones(M * K), out, M
    function, num_outputs = linear.operation(shape.kind), M * N

address = ctypes.addressof(args)
result = (ctypes.c_uint16 * num_outputs).from_address(out)
with recording.Recording() as recorded:
    try:
        taken = fill()
        function(address)
        print("no error")
    except native.NativeMemoryError as error:
        make_room(taken)
        print(error.operation, error.num_bytes > 0, str(error).split(" needs")[0])
taken = fill()
try:
    recorded.replay()
    print("no error")
except native.NativeMemoryError as error:
    make_room(taken)
    print(error.operation)
function(address)
first = bytes(result)
recorded.replay()
print(len(set(result)), bytes(result) == first, result[0] != 0)
"""


@pytest.mark.costly
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", ["attention", "bf16", "int8"])
def test_an_operation_without_memory_raises_an_error_with_its_name(name, num_threads):
    done = subprocess.run(
        [sys.executable, "-c", CHILD, name, str(num_threads)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    operation = "dk_attention" if name == "attention" else f"dk_linear_{name}"
    lines = done.stdout.splitlines()
    assert lines == [
        f"{operation} True the native operation {operation}",
        operation,
        "1 True True",
    ], done.stderr
