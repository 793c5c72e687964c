"""How ranks join a group, run collective operations and report errors."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch import distributed

from dovetail.errors import ConfigError, PeerLostError
from dovetail.interfaces import ONE_RANK, Platform, PlatformInfo, Probe, WorkerContext
from dovetail.plugins import PluginRegistry
from dovetail_devkit.contexts import make_config
from dovetail_torch.distributed import joining
from dovetail_torch.distributed.joining import join_ranks
from dovetail_torch.distributed.process_ranks import ProcessRanks
from dovetail_torch.worker import TorchWorker

DEVICE = torch.device("cpu")


class Runtime:
    """A runtime that only creates torch process groups over the loopback interface."""

    def activate(self, local_rank, *, num_threads):
        return DEVICE

    def join(self, store, *, rank, size, timeout):
        gloo = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timeout
        return ProcessRanks(gloo(store, rank, size, options), rank=rank, size=size)


class CollectivesPlatform(Platform):
    info = PlatformInfo(name="somewhere", device_type="cpu")
    can = frozenset({"dtype.float32", "collectives"})

    @classmethod
    def probe(cls):
        return Probe(usable=True)

    def capabilities(self):
        return self.can

    def total_memory_bytes(self, local_rank=0):
        return 1

    def runtime(self):
        return Runtime()


class PlatformWithoutCollectives(CollectivesPlatform):
    can = frozenset({"dtype.float32"})


@pytest.fixture
def model_dir(tmp_path):
    stated = {"architectures": ["Tiny"], "vocab_size": 11, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    return tmp_path


@pytest.fixture
def make_context(model_dir):
    def make(rank, size, *, platform=None, rendezvous=None, **options):
        platform = platform or CollectivesPlatform()
        options = {"tensor_parallel_size": size} | options
        return WorkerContext(
            config=make_config(model_dir, platform, **options).worker_config(),
            platform=platform,
            plugins=PluginRegistry(),
            rank=rank,
            world_size=size,
            rendezvous=f"file://{model_dir}/store" if rendezvous is None else rendezvous,
        )

    return make


def join(context):
    return join_ranks(context, context.platform.runtime(), DEVICE)


def on_ranks(contexts, work):
    """Join the rank of each context and run `work`, all in threads. Return the results."""
    with ThreadPoolExecutor(len(contexts)) as pool:
        return list(pool.map(lambda context: work(join(context)), contexts))


@pytest.fixture
def short_patience(monkeypatch):
    monkeypatch.setattr(joining, "_PATIENCE", timedelta(seconds=1))


def test_a_single_rank_does_not_join_a_process_group(make_context):
    assert join(make_context(0, 1, rendezvous="")) is ONE_RANK
    x = torch.ones(3)
    assert ONE_RANK.all_reduce(x) is ONE_RANK.all_gather(x) is ONE_RANK.broadcast(x) is x


@pytest.mark.costly
def test_a_single_rank_does_not_import_distributed_modules():
    program = """
import sys, torch
before = set(sys.modules)
import dovetail_torch.worker
new = {name for name in set(sys.modules) - before if name.startswith("torch.distributed")}
assert not new, new
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_ranks_run_collective_operations(make_context, size, dtype):
    def work(ranks):
        own = torch.arange(6).view(3, 2).to(dtype) + ranks.rank
        return (
            ranks.all_reduce(own.clone()),
            ranks.all_reduce(own.T),  # not contiguous
            ranks.all_gather(own),
            ranks.broadcast(own.clone()),
        )

    zero = torch.arange(6).view(3, 2).to(dtype)
    total = sum(zero + rank for rank in range(size))
    side_by_side = torch.cat([zero + rank for rank in range(size)], dim=1)
    for results in on_ranks([make_context(rank, size) for rank in range(size)], work):
        for actual, expected in zip(results, (total, total.T, side_by_side, zero), strict=True):
            assert torch.equal(actual, expected) and actual.dtype == dtype


def test_engines_in_one_process_do_not_share_a_group(make_context, tmp_path):
    contexts = [
        make_context(rank, 2, rendezvous=f"file://{tmp_path}/{engine}")
        for engine in "ab"
        for rank in range(2)
    ]
    sums = on_ranks(contexts, lambda ranks: ranks.all_reduce(torch.ones(2)))
    assert all(torch.equal(x, torch.full((2,), 2.0)) for x in sums)
    assert not distributed.is_initialized()


def test_a_rank_that_has_exited_is_reported(make_context, short_patience):
    def work(ranks):
        if ranks.rank:
            return None
        with pytest.raises(PeerLostError, match="rank 0 of 2 cannot run collective operations"):
            ranks.all_reduce(torch.ones(2))
        return True

    began = time.monotonic()
    assert on_ranks([make_context(rank, 2) for rank in range(2)], work) == [True, None]
    assert time.monotonic() - began < 10


def test_a_rank_that_does_not_join_is_reported(make_context, short_patience):
    with pytest.raises(
        PeerLostError, match=r"rank 0 of 2 could not connect to the other ranks at 'file://"
    ):
        join(make_context(0, 2))


def test_ranks_with_different_configurations_are_rejected(make_context):
    contexts = [make_context(0, 2), make_context(1, 2, max_num_batched_tokens=48)]

    def outcome(context):
        try:
            return join(context).size
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(outcome, contexts)
    assert first == 2
    assert "rank 1 of 2 differs from rank 0 in its configuration" in second


def test_all_reduces_that_depend_on_the_batch_are_rejected_with_batch_invariant(
    make_context, tmp_path
):
    def outcome(context):
        try:
            return join(context).size
        except ConfigError as error:
            return str(error)

    for size in (2, 3):
        options = {"batch_invariant": True, "rendezvous": f"file://{tmp_path}/{size}"}
        contexts = [make_context(rank, size, **options) for rank in range(size)]
        with ThreadPoolExecutor(size) as pool:
            outcomes = list(pool.map(outcome, contexts))
        if size == 2:
            assert outcomes == [2, 2]
        else:
            reason = "all-reduces over more than two ranks depend on the batch"
            assert all(reason in text for text in outcomes)


def test_a_number_of_workers_other_than_tensor_parallel_size_is_rejected(make_context):
    for rank, size, tensor_parallel_size in ((0, 1, 2), (0, 2, 1), (2, 2, 2), (-1, 2, 2)):
        context = make_context(rank, size, tensor_parallel_size=tensor_parallel_size)
        with pytest.raises(
            ConfigError,
            match=f"={tensor_parallel_size} was requested, but .* rank {rank} of {size}:",
        ):
            join(context)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rendezvous": ""}, "rendezvous '' is neither a file:// URL"),
        ({"rendezvous": "sftp://a/b"}, "rendezvous 'sftp://a/b' is neither a file:// URL"),
        ({"rendezvous": "file:///no/such/store"}, "in an existing directory"),
        (
            {"platform": PlatformWithoutCollectives()},
            "platform 'somewhere' does not declare 'collectives'",
        ),
    ],
)
def test_invalid_rank_contexts_are_rejected_without_waiting_for_other_ranks(
    make_context, changes, message
):
    with pytest.raises(ConfigError, match=message):
        join(make_context(0, 3, **changes))


class Whole(torch.nn.Module):
    """A model that does not declare support for several ranks."""

    def __init__(self, context):
        raise AssertionError("it must not be created")


class Registry(PluginRegistry):
    def resolve(self, kind, reference):
        return super().resolve(kind, f"{__name__}:Whole" if kind == "model" else reference)

    def load(self, kind, reference):
        return Whole if kind == "model" else super().load(kind, reference)


def test_a_model_that_does_not_support_several_ranks_is_rejected(make_context):
    def outcome(rank):
        worker = TorchWorker(replace(make_context(rank, 2), plugins=Registry()))
        worker.init_device()
        with pytest.raises(ConfigError, match="Whole does not declare 'tensor_parallel'"):
            worker.load_model()
        worker.shutdown()
        return True

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(outcome, range(2))) == [True, True]
