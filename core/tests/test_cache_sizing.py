import pytest

from dovetail.errors import CapacityError, ModelError
from dovetail.interfaces import FullAttentionSpec, KVCacheConfig, NoCacheSpec
from dovetail.kv_cache.sizing import fit_model_len, group_layers, size_cache

BYTES_PER_BLOCK = 2 * 16 * 2 * 8 * 4


def spec(**changes):
    fields = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": "float32"}
    return FullAttentionSpec(**(fields | changes))


def groups(num_layers=3):
    return group_layers([{f"l{i}": spec() for i in range(num_layers)}], block_size=16)


def size(**changes):
    asked = {"available_bytes": 10**9, "num_blocks": None, "max_useful_tokens": 160}
    return size_cache(groups(), **(asked | changes))


def test_equal_layers_share_a_group_and_windows_make_no_other():
    specs = {"a": spec(), "b": spec(sliding_window=7), "c": spec()}
    (group,) = group_layers([specs, specs], block_size=16)
    assert group.layer_names == ("a", "b", "c")
    assert group.spec == spec()
    assert group.bytes_per_block == 3 * BYTES_PER_BLOCK


def test_a_model_that_keeps_nothing_still_counts_its_tokens():
    (group,) = group_layers([{}], block_size=4)
    assert group.spec == NoCacheSpec(block_size=4) and group.bytes_per_block == 0
    config = size_cache((group,), available_bytes=0, num_blocks=None, max_useful_tokens=10)
    assert config.num_blocks == 4  # three for ten tokens, and block 0


def test_layers_of_different_shapes_are_refused_by_name():
    specs = {"a": spec(), "b": spec(head_size=16)}
    with pytest.raises(ModelError, match=r"a: .*; b: "):
        group_layers([specs], block_size=16)


def test_ranks_must_agree():
    with pytest.raises(ModelError, match="disagree"):
        group_layers([{"a": spec()}, {"a": spec(num_kv_heads=1)}], block_size=16)


@pytest.mark.parametrize(
    ("changes", "num_blocks"),
    [
        ({}, 11),  # no more than is of use, and block 0
        ({"available_bytes": 5 * 3 * BYTES_PER_BLOCK + 100}, 5),
        ({"num_blocks": 7}, 7),
        ({"num_blocks": 1000}, 1000),
        ({"max_useful_tokens": 161}, 12),
    ],
)
def test_blocks_are_what_memory_holds_and_requests_can_use(changes, num_blocks):
    assert size(**changes).num_blocks == num_blocks


@pytest.mark.parametrize(
    "changes", [{"available_bytes": 2 * 3 * BYTES_PER_BLOCK - 1}, {"available_bytes": -5}]
)
def test_less_than_two_blocks_is_no_cache(changes):
    with pytest.raises(CapacityError, match="two blocks of 16 tokens"):
        size(**changes)


def config(num_blocks):
    return KVCacheConfig(num_blocks=num_blocks, groups=groups())


def test_a_length_that_fits_stays():
    assert fit_model_len(config(5), max_model_len=64, asked_by_user=True) == (64, "")


def test_a_length_that_does_not_fit_is_lowered_with_a_reason():
    length, reason = fit_model_len(config(5), max_model_len=65, asked_by_user=False)
    assert length == 64 and "64 tokens" in reason


def test_a_length_that_the_user_asked_for_is_not_lowered():
    with pytest.raises(CapacityError, match=r"max_model_len=65 needs 6 KV blocks.*lower.*to 64"):
        fit_model_len(config(5), max_model_len=65, asked_by_user=True)
