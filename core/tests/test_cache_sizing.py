import pytest

from dovetail.errors import CapacityError
from dovetail.interfaces import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    NoCacheSpec,
    StateSpec,
)
from dovetail.kv_cache.demand import MAX_TOKENS, max_sequence_tokens, sequence_blocks
from dovetail.kv_cache.sizing import Load, fit_model_len, size_cache

SIZE = 16
BYTES_PER_BLOCK = 3 * 2 * SIZE * 2 * 8 * 4


def spec(window=0):
    return FullAttentionSpec(
        block_size=SIZE, num_kv_heads=2, head_size=8, dtype="float32", sliding_window=window
    )


def groups(*specs, num_layers=3):
    names = [tuple(f"{g}.{i}" for i in range(num_layers)) for g in range(len(specs))]
    return tuple(
        KVCacheGroup(layer_names=layers, spec=item)
        for layers, item in zip(names, specs, strict=True)
    )


def load(**changes):
    fields = {"max_num_seqs": 2, "max_model_len": 80, "max_step_tokens": 64}
    return Load(**(fields | changes))


LOAD = load()


def size(*, of=None, load=LOAD, num_layers=3, **changes):
    requested = {"available_bytes": 10**9, "num_blocks": None}
    created = groups(*(of or (spec(),)), num_layers=num_layers)
    return size_cache(created, load, **(requested | changes))


def config(num_blocks, *specs):
    return KVCacheConfig(num_blocks=num_blocks, groups=groups(*(specs or (spec(),))))


@pytest.mark.parametrize(
    ("changes", "num_blocks"),
    [
        ({}, 10**9 // BYTES_PER_BLOCK),
        ({"available_bytes": 5 * BYTES_PER_BLOCK + 100}, 5),
        ({"num_blocks": 7}, 7),
        ({"num_blocks": 1000}, 1000),
        ({"load": load(max_num_seqs=1, max_model_len=16)}, 10**9 // BYTES_PER_BLOCK),
        ({"of": (spec(), spec())}, 10**9 // BYTES_PER_BLOCK),
        ({"available_bytes": 2**50, "of": (spec(),), "num_layers": 1}, 2**31 - 1),
        ({"of": (spec(), spec(16)), "available_bytes": 9 * BYTES_PER_BLOCK}, 9),
        ({"of": (NoCacheSpec(block_size=4),), "load": load(max_model_len=10)}, 7),
    ],
)
def test_the_number_of_blocks_depends_on_memory_only(changes, num_blocks):
    assert size(**changes).num_blocks == num_blocks


@pytest.mark.parametrize(
    "changes", [{"available_bytes": 2 * BYTES_PER_BLOCK - 1}, {"available_bytes": -5}]
)
def test_a_kv_cache_needs_at_least_two_blocks(changes):
    with pytest.raises(CapacityError, match="two blocks of 16 tokens"):
        size(**changes)


def fit(config, length, *, step=64, requested=False):
    return fit_model_len(
        config, max_model_len=length, max_step_tokens=step, requested_by_user=requested
    )


def test_a_max_model_len_that_fits_is_not_changed():
    assert fit(config(5), 64, requested=True) == (64, "")


def test_a_default_max_model_len_that_does_not_fit_is_lowered():
    length, reason = fit(config(5), 65)
    assert length == 64 and "64 tokens" in reason


def test_a_max_model_len_set_by_the_user_is_not_lowered():
    with pytest.raises(CapacityError, match=r"max_model_len=65 needs 6 KV blocks.*lower.*to 64"):
        fit(config(5), 65, requested=True)


def test_a_cache_too_small_for_one_sequence_is_rejected():
    with pytest.raises(CapacityError, match="lower max_model_len to 0"):
        fit(config(2, spec(), spec()), 16)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 18, 33, 40])
@pytest.mark.parametrize("step", [1, 2, 16, 17, 30])
def test_a_sliding_window_and_one_step_never_need_more_blocks_than_estimated(window, step):
    maximum = sequence_blocks(config(2, spec(window)), 10**6, max_step_tokens=step)
    for start in range(100):
        oldest = max(0, start - window + 1) // SIZE
        assert (start + step - 1) // SIZE - oldest + 1 <= maximum


def test_the_reported_maximum_sequence_length_just_fits_into_the_cache():
    for specs in [(spec(),), (spec(), spec(20)), (spec(), spec(), spec(40))]:
        for num_blocks in range(4, 40):
            cache = config(num_blocks, *specs)
            length = max_sequence_tokens(cache, max_step_tokens=24)
            assert sequence_blocks(cache, length, max_step_tokens=24) < num_blocks
            assert sequence_blocks(cache, length + 1, max_step_tokens=24) >= num_blocks


def test_caches_of_sliding_windows_and_states_support_any_sequence_length():
    assert max_sequence_tokens(config(9, spec(32)), max_step_tokens=64) > MAX_TOKENS - SIZE
    assert max_sequence_tokens(config(9, spec(32))) == 8 * SIZE  # any step size is valid
    state = StateSpec(block_size=SIZE, num_bytes=64)
    assert max_sequence_tokens(config(2, state)) > MAX_TOKENS - SIZE
    assert max_sequence_tokens(config(9, spec(), state)) == 7 * SIZE
