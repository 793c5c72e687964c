"""Several ranks on CPUs: shares of cores, memory and packed weights, and parallel layers."""

import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed, nn

from dovetail.errors import PeerLostError
from dovetail.interfaces import ModelContext, OneRank, WeightLoaderContext
from dovetail_cpu.native_library import probe_any
from dovetail_cpu.packed_cache.cache import PackedCache
from dovetail_cpu.packed_cache.folder import packed_folder
from dovetail_cpu.platform import CPUPlatform
from dovetail_cpu.runtime import CPURuntime
from dovetail_cpu.worker import CPUWorker
from dovetail_devkit.contexts import make_worker_context
from dovetail_devkit.tiny_model import write_tiny_llama
from dovetail_torch.layers import (
    MergedColumnParallelLinear,
    RowParallelLinear,
    TorchOps,
    VocabParallelEmbedding,
    pack_linears,
)
from dovetail_torch.weights import SafetensorsLoader, assignment

D, INNER, V, TOKENS = 64, 192, 70, 7
SHAPES = {
    "embed.weight": (V, D),
    "gate_proj.weight": (INNER, D),
    "up_proj.weight": (INNER, D),
    "gate_proj.bias": (INNER,),
    "up_proj.bias": (INNER,),
    "down.weight": (D, INNER),
    "down.bias": (D,),
}
ERRORS = {"native": 0.006, "int8": 0.02, "int4": 0.2}
"""Maximum relative error of two consecutive matrix products, compared with unpacked weights."""
native = pytest.mark.skipif(not probe_any().usable, reason="native kernels are not available")


def make_method(name):
    from dovetail_cpu.native_linear import NativeLinearMethod
    from dovetail_cpu.quantized_linear import Int4LinearMethod, Int8LinearMethod

    methods = {"native": NativeLinearMethod, "int8": Int8LinearMethod, "int4": Int4LinearMethod}
    return methods[name]()


class Model(nn.Module):
    """A column-parallel layer followed by a row-parallel layer."""

    def __init__(self, name, rank, size):
        super().__init__()
        context = ModelContext(
            hf_config={},
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            linear_method=make_method(name),
            ops=TorchOps(),
            max_model_len=8,
            ranks=OneRank(rank=rank, size=size),  # the test computes the sums
        )
        self.embed = VocabParallelEmbedding(context, V, D)
        parts = {"gate_proj": INNER, "up_proj": INNER}
        self.up = MergedColumnParallelLinear(context, "up", D, parts, bias=True)
        self.down = RowParallelLinear(context, "down", INNER, D, bias=True)

    def forward(self, x_TD):
        gate_TF, up_TF = self.up(x_TD).chunk(2, dim=-1)
        return self.down(gate_TF + up_TF)


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "checkpoint"
    path.mkdir()
    generator = torch.Generator().manual_seed(6)
    weights = {n: torch.randn(s, generator=generator).bfloat16() for n, s in SHAPES.items()}
    save_file(weights, path / "model.safetensors")
    return path


@torch.inference_mode()
def load(checkpoint, name, rank, size, folder=None):
    """Return a packed model, and whether its packed weights came from `folder`."""
    model = Model(name, rank, size)
    loader = SafetensorsLoader(WeightLoaderContext(model_dir=checkpoint, progress=False))
    cache = None
    if folder is not None:
        cache = PackedCache(folder, model, loader.fingerprint(), files=[], min_bytes=0)
    is_restored = cache is not None and cache.restore(num_threads=1)
    loader.load(model)
    pack_linears(model)
    if cache is not None and not is_restored:
        cache.save()
        cache.wait()
    return model, is_restored


def inputs():
    return torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(7)).bfloat16()


@native
@torch.inference_mode()
@pytest.mark.parametrize("lent", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ERRORS)
def test_the_matrix_products_of_all_ranks_sum_to_the_whole_matrix_product(
    checkpoint, monkeypatch, name, size, lent
):
    """With int4 and 4 ranks, a rank's 48 inputs are not a multiple of the group size."""
    if lent:
        monkeypatch.setattr(assignment, "BORROWED_BYTES", 0)
    whole, _ = load(checkpoint, "native", 0, 1)
    x_TD = inputs()
    reference_TD = whole(x_TD).double()
    parts = [load(checkpoint, name, rank, size)[0] for rank in range(size)]
    total_TD = sum(part(x_TD).double() for part in parts)
    error = (total_TD - reference_TD).norm() / reference_TD.norm()
    assert error < ERRORS[name]
    assert parts[0].down.bias is not None and all(part.down.bias is None for part in parts[1:])
    held = [sum(len(p.linear_method.packed_form(p)) for p in (m.up, m.down)) for m in parts]
    alone, _ = load(checkpoint, name, 0, 1)
    packed = sum(len(p.linear_method.packed_form(p)) for p in (alone.up, alone.down))
    # A shard's last panel is padded to 32 features, and its last int4 group to a whole group.
    assert all(packed / size <= item <= 1.35 * packed / size for item in held)


@native
@torch.inference_mode()
@pytest.mark.parametrize("name", ERRORS)
def test_each_rank_caches_its_own_packed_weights(checkpoint, tmp_path, name):
    folder = packed_folder(tmp_path / "cache", max_bytes=1 << 20)
    first = [load(checkpoint, name, rank, 2, folder) for rank in range(2)]
    second = [load(checkpoint, name, rank, 2, folder) for rank in range(2)]
    assert [restored for _, restored in first] == [False, False]
    assert [restored for _, restored in second] == [True, True]
    assert not load(checkpoint, name, 0, 1, folder)[1]
    for (item, _), (other, _) in zip(first, second, strict=True):
        assert torch.equal(item(inputs()), other(inputs()))
    assert not torch.equal(first[0][0](inputs()), first[1][0](inputs()))


def test_worker_processes_divide_the_cores_and_memory_of_a_machine():
    alone, shared = CPURuntime(), CPURuntime()
    shared.num_sharing = 2
    alone.activate(0, num_threads=None)
    shared.activate(1, num_threads=None)
    assert shared.num_threads == max(1, alone.num_threads // 2)
    assert shared.total_memory_bytes() == alone.total_memory_bytes() // 2
    shared.activate(1, num_threads=3)
    assert shared.num_threads == 3


def join_all(folder, size):
    """Return the ranks of one group. Each rank joins in a separate thread."""

    def join(rank):
        store = distributed.FileStore(str(folder / "store"), size)
        return CPURuntime().join(store, rank=rank, size=size, timeout=timedelta(seconds=10))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join, range(size)))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_summed_in_rank_order(tmp_path, size, dtype):
    generator = torch.Generator().manual_seed(8)
    tensors = [torch.randn(6, 33, generator=generator).to(dtype) for _ in range(size)]
    total = sum(tensors[1:], tensors[0])

    def work(ranks):
        own = tensors[ranks.rank]
        return (
            ranks.all_reduce(own.clone()),
            ranks.all_reduce(own.T),
            ranks.all_reduce(own[3:5, 7:9].clone()),  # the same rows in a smaller batch
            ranks.all_gather(own),
            ranks.broadcast(own.clone()),
        )

    expected = (total, total.T, total[3:5, 7:9], torch.cat(tensors, dim=1), tensors[0])
    all_ranks = join_all(tmp_path, size)
    with ThreadPoolExecutor(size) as pool:
        for results in pool.map(work, all_ranks):
            for actual, sought in zip(results, expected, strict=True):
                assert torch.equal(actual, sought) and actual.dtype == dtype
    assert all(ranks.batch_invariant for ranks in all_ranks)


def test_a_lost_rank_is_reported(tmp_path):
    first, second = join_all(tmp_path, 2)
    del second
    with pytest.raises(
        PeerLostError, match="rank 0 of 2 cannot run collective operations with other ranks"
    ):
        first.all_reduce(torch.ones(2))


def test_a_connection_without_the_token_is_closed(tmp_path):
    """A connection that sends nothing or sends a rank without the token is closed, too."""
    store = distributed.FileStore(str(tmp_path / "store"), 2)
    join = partial(CPURuntime().join, size=2, timeout=timedelta(seconds=10))
    tmp_path.chmod(0o700)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, store, rank=0)
        store.get("rank0")
        strangers = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for stranger in strangers:
            stranger.connect(str(tmp_path / "ranks" / "rank0"))
        strangers[0].sendall(bytes(16) + b"\0\1")
        strangers[1].sendall(b"short")
        for stranger in strangers[1:]:
            stranger.shutdown(socket.SHUT_WR)
        second = join(distributed.FileStore(str(tmp_path / "store"), 2), rank=1)
        ranks = first.result(20)
    for stranger in strangers:
        with stranger:
            assert stranger.recv(1) == b"", "it was closed"
    assert not (tmp_path / "ranks").exists()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(second.all_reduce, torch.ones(3))
        assert torch.equal(ranks.all_reduce(torch.ones(3)), torch.full((3,), 2.0))
        assert torch.equal(other.result(5), torch.full((3,), 2.0))


@pytest.mark.costly
@pytest.mark.parametrize("elements", [0, 1, 100_000, 5_000_000])
def test_collective_operations_support_tensors_of_any_size(tmp_path, elements):
    """Tensors use sockets if they are small or larger than a slot, else shared memory."""
    all_ranks = join_all(tmp_path, 3)

    def work(ranks):
        for turn in range(5):
            total = ranks.all_reduce(torch.full((elements,), float(turn + ranks.rank)))
            yield torch.equal(total, torch.full((elements,), 3.0 * turn + 3))

    with ThreadPoolExecutor(3) as pool:
        assert all(map(all, pool.map(lambda ranks: list(work(ranks)), all_ranks)))


def test_ranks_that_send_tensors_of_different_sizes_get_an_error(tmp_path):
    first, second = join_all(tmp_path, 2)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(second.all_reduce, torch.ones(3))
        with pytest.raises(PeerLostError, match="received 12 bytes, expected 8"):
            first.all_reduce(torch.ones(2))
        with pytest.raises(PeerLostError, match="received 8 bytes, expected 12"):
            other.result(5)


def test_ranks_that_send_large_tensors_of_different_sizes_get_an_error(tmp_path):
    first, second = join_all(tmp_path, 2)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(second.all_reduce, torch.ones(1 << 17))
        with pytest.raises(PeerLostError, match="do not run the same step"):
            first.all_reduce(torch.ones(1 << 18))
        with pytest.raises(PeerLostError, match="do not run the same step"):
            other.result(5)


def shared_worker(folder):
    """Return one worker of an engine with two workers."""
    context = make_worker_context(write_tiny_llama(folder), CPUPlatform(), tensor_parallel_size=2)
    return CPUWorker(replace(context, world_size=2))


def test_the_runtime_counts_the_ranks_that_share_the_machine(tmp_path, monkeypatch):
    worker = shared_worker(tmp_path)
    monkeypatch.setattr("dovetail_torch.worker.join_ranks", lambda *args: OneRank(size=2))
    worker.init_device()
    assert worker._runtime.num_sharing == 2


def test_steps_of_several_ranks_are_not_replayed_and_the_log_says_why(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    worker = shared_worker(tmp_path)
    worker._is_native = True
    assert worker.graph_provider() is None
    assert "Steps are not replayed: each step contains" in caplog.text
