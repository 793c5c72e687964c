"""Layers share the memory of the KV cache, and unused memory is not allocated."""

import subprocess
import sys

import pytest
import torch

from dovetail.errors import ModelError
from dovetail.interfaces import (
    AttentionCapabilities,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
)
from dovetail_devkit.fakes.attention import FakeAttentionBackend
from dovetail_torch.runner.cache_buffers import PADDED_PAGES, take_buffers

NUM_BLOCKS = 5


class BlocksFirst(FakeAttentionBackend):
    """A backend with a contiguous cache of shape [N, B, 2, K, D]."""

    @staticmethod
    def kv_cache_shape(num_blocks, spec):
        return (num_blocks, spec.block_size, 2, spec.num_kv_heads, spec.head_size)


class Strided(BlocksFirst):
    """A backend with the same cache shape that supports strided blocks."""

    capabilities = AttentionCapabilities(
        dtypes=frozenset({"float32"}), features=frozenset({PADDED_PAGES})
    )


def spec(head_size=2, window=0):
    return FullAttentionSpec(
        block_size=4, num_kv_heads=1, head_size=head_size, dtype="float32", sliding_window=window
    )


def zeros(num_bytes):
    return torch.zeros(num_bytes, dtype=torch.uint8)


def take(backend, *groups):
    """Return the buffers of groups.

    A group is a list of specs; layer j of group i is named "i.j".
    """
    specs = {f"{g}.{i}": layer for g, layers in enumerate(groups) for i, layer in enumerate(layers)}
    config = KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        groups=tuple(
            KVCacheGroup(layer_names=tuple(f"{g}.{i}" for i in range(len(layers))), spec=layers[0])
            for g, layers in enumerate(groups)
        ),
    )
    return take_buffers(backend, specs, config, zeros), config


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("backend", [FakeAttentionBackend, BlocksFirst])
def test_layers_with_the_same_index_in_all_groups_share_a_buffer(backend):
    buffers, config = take(backend, [spec(), spec()], [spec(window=8), spec(window=8)], [spec()])
    caches = buffers.caches
    assert config.num_buffers == 2
    assert storage(caches["0.0"]) == storage(caches["1.0"]) == storage(caches["2.0"])
    assert storage(caches["0.1"]) == storage(caches["1.1"]) != storage(caches["0.0"])
    assert all(c.dtype == torch.float32 and c.is_contiguous() for c in caches.values())
    assert len(buffers.pages_NP) == (2 if backend is BlocksFirst else 0)


def test_each_block_has_one_row_in_every_buffer():
    buffers, config = take(BlocksFirst, [spec(), spec()], [spec()])
    for number, name in enumerate(("0.0", "0.1")):
        buffers.caches[name][3] = number + 1.5
    for number, pages_NP in enumerate(buffers.pages_NP):
        assert pages_NP.shape == (NUM_BLOCKS, config.page_size_bytes)
        assert (pages_NP[3].view(torch.float32) == number + 1.5).all()
        assert not pages_NP[[0, 1, 2, 4]].any()


def test_pages_of_different_sizes_start_at_the_same_byte_of_a_block():
    buffers, config = take(Strided, [spec(head_size=3)], [spec(head_size=2)])
    assert config.page_size_bytes == 128  # the layers use 96 and 64 bytes
    large, small = buffers.caches["0.0"], buffers.caches["1.0"]
    assert large.shape == (NUM_BLOCKS, 4, 2, 1, 3) and small.shape == (NUM_BLOCKS, 4, 2, 1, 2)
    large[1], small[2] = 1.0, 2.0
    values = buffers.pages_NP[0].view(torch.float32)
    assert (values[1] == torch.tensor([1.0] * 24 + [0.0] * 8)).all()
    assert (values[2] == torch.tensor([2.0] * 16 + [0.0] * 16)).all()
    assert not values[[0, 3, 4]].any()


def test_strided_blocks_are_rejected_for_a_backend_that_requires_contiguous_blocks():
    with pytest.raises(ModelError, match="'fake' does not declare 'padded_pages'"):
        take(BlocksFirst, [spec(head_size=3)], [spec(head_size=2)])


@pytest.mark.costly
def test_creating_the_buffers_allocates_no_pages():
    code = (
        "import resource, torch\n"
        "from dovetail.interfaces import FullAttentionSpec, KVCacheConfig, KVCacheGroup\n"
        "from dovetail_devkit.fakes.attention import FakeAttentionBackend as B\n"
        "from dovetail_torch.runner.cache_buffers import take_buffers\n"
        "spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype='float32')\n"
        "names = tuple(map(str, range(4)))\n"
        "group = KVCacheGroup(layer_names=names, spec=spec)\n"
        "config = KVCacheConfig(num_blocks=2048, groups=(group,))\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "taken = take_buffers(B, dict.fromkeys(names, spec), config,\n"
        "                     lambda n: torch.empty(n, dtype=torch.uint8))\n"
        "total = sum(c.nbytes for c in taken.caches.values())\n"
        "print(total >> 20, (peak() - before) >> 10)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    total_mib, grown_mib = map(int, done.stdout.split())
    assert total_mib == 1024 and grown_mib < 32
