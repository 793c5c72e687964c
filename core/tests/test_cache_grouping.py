import pytest

from dovetail.errors import ModelError
from dovetail.interfaces import FullAttentionSpec, KVCacheConfig, NoCacheSpec, StateSpec
from dovetail.kv_cache.demand import sequence_blocks
from dovetail.kv_cache.grouping import group_layers, padding_share

SIZE = 16


def spec(window=0, **changes):
    fields = {"block_size": SIZE, "num_kv_heads": 2, "head_size": 8, "dtype": "float32"}
    return FullAttentionSpec(**(fields | changes), sliding_window=window)


def group(*specs, max_model_len=4096):
    named = {f"layer{i}": one for i, one in enumerate(specs)}
    return group_layers([named, named], block_size=SIZE, max_model_len=max_model_len)


def shape(groups):
    return [(one.spec.sliding_window, len(one.layer_names)) for one in groups]


def test_equal_layers_share_a_group():
    (one,) = group(spec(), spec(), spec())
    assert one.layer_names == ("layer0", "layer1", "layer2") and one.spec == spec()


def test_a_model_that_keeps_nothing_still_counts_its_tokens():
    (one,) = group()
    assert one.spec == NoCacheSpec(block_size=SIZE) and one.bytes_per_block == 0


def test_windows_alone_are_a_group_that_sheds():
    assert shape(group(spec(64), spec(64))) == [(64, 2)]


@pytest.mark.parametrize("max_model_len", [64, 50, 1])
def test_a_window_that_nobody_fills_makes_no_group(max_model_len):
    assert shape(group(spec(), spec(64), max_model_len=max_model_len)) == [(0, 2)]


def test_interleaved_windows_get_groups_of_equal_size():
    layers = [spec(512 if i % 6 != 5 else 0) for i in range(26)]  # as Gemma 3: 22 and 4
    groups = group(*layers, max_model_len=32768)
    assert shape(groups) == [(512, 4)] * 5 + [(512, 2), (0, 4)]
    names = [name for one in groups for name in one.layer_names]
    assert sorted(names) == sorted(f"layer{i}" for i in range(26))
    assert padding_share(groups) == pytest.approx(1 - 26 / 28)
    config = KVCacheConfig(num_blocks=2, groups=groups)
    shared = KVCacheConfig(num_blocks=2, groups=group(*[spec()] * 26))
    needs = [
        sequence_blocks(one, 32768, max_step_tokens=2048) * one.bytes_per_block
        for one in (config, shared)
    ]
    assert needs[0] < needs[1] / 3


def test_fewer_groups_are_taken_where_that_costs_little():
    layers = [spec(64)] * 10 + [spec()] * 11
    assert shape(group(*layers, max_model_len=32768)) == [(64, 10), (0, 11)]


def test_pages_of_unequal_bytes_are_padded_to_the_largest():
    groups = group(spec(), StateSpec(block_size=SIZE, num_bytes=5000))
    config = KVCacheConfig(num_blocks=3, groups=groups)
    assert len(groups) == 2
    assert config.page_size_bytes == 5056 and config.num_buffers == 1
    used = spec().page_size_bytes + 5000
    assert padding_share(groups) == pytest.approx(1 - used / (2 * 5056))
    same = KVCacheConfig(num_blocks=3, groups=group(spec()))
    assert same.page_size_bytes == spec().page_size_bytes


def test_layers_of_different_heads_are_served_side_by_side():
    groups = group(spec(), spec(head_size=16))
    assert [len(one.layer_names) for one in groups] == [1, 1]


def test_ranks_must_agree():
    with pytest.raises(ModelError, match="disagree"):
        group_layers(
            [{"a": spec()}, {"a": spec(num_kv_heads=1)}], block_size=SIZE, max_model_len=64
        )


def test_blocks_hold_equally_many_tokens():
    with pytest.raises(ModelError, match="layer0: 16; layer1: 8"):
        group(spec(), spec(block_size=8))
