import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import ModelError
from dovetail.interfaces import FullAttentionSpec, KVCacheConfig, NoCacheSpec, StateSpec
from dovetail.kv_cache.demand import sequence_blocks
from dovetail.kv_cache.grouping import group_layers, padding_share

SIZE = 16


def spec(window=0, **changes):
    fields = {"block_size": SIZE, "num_kv_heads": 2, "head_size": 8, "dtype": "float32"}
    return FullAttentionSpec(**(fields | changes), sliding_window=window)


def group(*specs, max_model_len=4096, step=0):
    named = {f"layer{i}": item for i, item in enumerate(specs)}
    return group_layers(
        [named, named], block_size=SIZE, max_model_len=max_model_len, max_step_tokens=step
    )


def shape(groups):
    return [(item.spec.sliding_window, len(item.layer_names)) for item in groups]


def test_layers_with_equal_cache_specs_share_a_cache_group():
    (first,) = group(spec(), spec(), spec())
    assert first.layer_names == ("layer0", "layer1", "layer2") and first.spec == spec()


def test_a_model_without_a_cache_has_one_cache_group_that_counts_tokens():
    (first,) = group()
    assert first.spec == NoCacheSpec(block_size=SIZE) and first.bytes_per_block == 0


def test_layers_with_the_same_sliding_window_form_a_cache_group():
    assert shape(group(spec(64), spec(64))) == [(64, 2)]


@pytest.mark.parametrize("max_model_len", [64, 50, 1])
def test_a_sliding_window_of_at_least_max_model_len_counts_as_full_attention(max_model_len):
    assert shape(group(spec(), spec(64), max_model_len=max_model_len)) == [(0, 2)]


def test_interleaved_sliding_windows_get_cache_groups_of_equal_size():
    # like Gemma 3: 22 windows and 4 full layers
    layers = [spec(512 if i % 6 != 5 else 0) for i in range(26)]
    groups = group(*layers, max_model_len=32768)
    assert shape(groups) == [(512, 4)] * 5 + [(512, 2), (0, 4)]
    names = [name for item in groups for name in item.layer_names]
    assert sorted(names) == sorted(f"layer{i}" for i in range(26))
    assert padding_share(groups) == pytest.approx(1 - 26 / 28)
    config = KVCacheConfig(num_blocks=2, groups=groups)
    shared = KVCacheConfig(num_blocks=2, groups=group(*[spec()] * 26))
    needs = [
        sequence_blocks(item, 32768, max_step_tokens=2048) * item.bytes_per_block
        for item in (config, shared)
    ]
    assert needs[0] < needs[1] / 3


def test_layers_share_cache_groups_if_that_wastes_little_memory():
    layers = [spec(64)] * 10 + [spec()] * 11
    assert shape(group(*layers, max_model_len=32768)) == [(64, 10), (0, 11)]


def state(num_bytes, snapshots=False):
    return StateSpec(block_size=SIZE, num_bytes=num_bytes, snapshots=snapshots)


def heads(num, size, window=0):
    return spec(window, num_kv_heads=num, head_size=size, dtype="bfloat16")


def allocated(groups, length, step):
    config = KVCacheConfig(num_blocks=2, groups=groups)
    return sequence_blocks(config, length, max_step_tokens=step) * config.bytes_per_block


def needed(layers, length, step):
    """Return the bytes that one sequence needs, computed independently of the tested code.

    A state with snapshots is read from one page and written to another one.
    """
    total = 0
    for layer in layers:
        if isinstance(layer, StateSpec):
            total += layer.num_bytes * (1 + layer.snapshots)
            continue
        window = layer.sliding_window
        kept = min(length, window - 1 + step) if window else length
        width = {"bfloat16": 2, "float32": 4}[layer.dtype]
        total += kept * 2 * layer.num_kv_heads * layer.head_size * width
    return total


MIB = 1 << 20
MODELS = {
    "gemma 3, 27b": [heads(16, 128, 1024 if i % 6 != 5 else 0) for i in range(62)],
    "gemma 3, 1b": [heads(1, 256, 512 if i % 6 != 5 else 0) for i in range(26)],
    "windows with heads of a different size": [
        heads(16, 256, 1024) if i % 6 != 5 else heads(4, 512) for i in range(30)
    ],
    "jamba": [heads(8, 128) if i % 8 == 4 else state(622_592) for i in range(32)],
    "qwen 3 next": [heads(2, 256) if i % 4 == 3 else state(2_146_304) for i in range(48)],
    "qwen 3 next, snapshots": [
        heads(2, 256) if i % 4 == 3 else state(2_146_304, snapshots=True) for i in range(48)
    ],
    "8 full layers and 24 large states": [heads(8, 128)] * 8 + [state(2 * MIB)] * 24,
    "three head sizes": [heads(4, 64)] * 5 + [heads(4, 80)] * 7 + [heads(4, 128)] * 3,
    "states of three sizes": [state(2 * MIB)] * 3 + [state(50_000)] * 20 + [state(MIB // 2)] * 7,
}


@pytest.mark.parametrize("length", [4096, 8192, 32768])
@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_uses_at_most_1_3_times_the_bytes_that_it_needs(name, length):
    groups = group(*MODELS[name], max_model_len=length, step=2048)
    assert allocated(groups, length, 2048) <= 1.3 * needed(MODELS[name], length, 2048)
    assert len(groups) <= 8


def test_8_full_attention_layers_and_24_large_states_need_0_3_gib_for_8192_tokens():
    groups = group(*MODELS["8 full layers and 24 large states"], max_model_len=8192, step=2048)
    assert allocated(groups, 8192, 2048) < 0.32 * 2**30


ATTENTION = st.builds(
    heads,
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([64, 80, 96, 128, 192, 256, 512]),
    st.sampled_from([0, 0, 0, 128, 512, 1024, 4096]),
)
STATES = st.builds(state, st.integers(10_000, 4 * MIB), st.booleans())


@pytest.mark.costly
@settings(max_examples=20, deadline=None)
@given(
    kinds=st.lists(
        st.tuples(st.one_of(ATTENTION, STATES), st.integers(1, 40)), min_size=1, max_size=4
    ),
    length=st.sampled_from([4096, 8192, 32768]),
    step=st.sampled_from([256, 2048]),
)
def test_random_mixes_of_layers_waste_little_memory(kinds, length, step):
    layers = [item for item, count in kinds for _ in range(count)]
    groups = group(*layers, max_model_len=length, step=step)
    names = [name for item in groups for name in item.layer_names]
    assert sorted(names) == sorted(f"layer{i}" for i in range(len(layers)))
    # A page holds at least the largest state, and a sequence has at least one page of each group.
    # A short sequence with large states cannot waste less.
    largest = max((layer.num_bytes for layer in layers if isinstance(layer, StateSpec)), default=0)
    floor = needed(layers, length, step)
    assert allocated(groups, length, step) <= 1.3 * floor + 2 * largest * len(set(layers))
    if not largest or floor >= 64 * largest:
        assert allocated(groups, length, step) <= 1.3 * floor


def test_layers_with_smaller_pages_get_larger_blocks():
    groups = group(spec(), spec(head_size=16))
    assert [item.spec.block_size for item in groups] == [2 * SIZE, SIZE]
    config = KVCacheConfig(num_blocks=3, groups=groups)
    assert config.block_size == SIZE and padding_share(groups) == 0
    assert config.page_size_bytes == groups[0].spec.page_size_bytes


def test_a_block_of_states_covers_at_most_one_sequence():
    (states,) = group(state(10_000, True), max_model_len=664, step=64)
    assert SIZE < states.spec.block_size <= 664
    (states,) = group(state(10_000, True), max_model_len=7, step=64)
    assert states.spec.block_size == SIZE


def test_small_states_share_the_page_of_a_large_state():
    groups = group(*[state(1000)] * 5, state(5000), max_model_len=4096)
    shared = next(item for item in groups if item.spec.num_bytes == 1000)
    assert shared.layers_per_page == len(shared.layer_names) == 5
    config = KVCacheConfig(num_blocks=3, groups=groups)
    indexes = [shared.place(layer) for layer in range(5)]
    assert indexes == [(0, 1024 * layer) for layer in range(5)]
    assert config.num_buffers == 1 and config.page_size_bytes == 5120


def test_layers_with_pages_of_equal_size_keep_their_block_size():
    groups = group(spec(64), spec(), spec(num_kv_heads=1, head_size=16), max_model_len=32768)
    assert {item.spec.block_size for item in groups} == {SIZE}


def test_cache_specs_must_be_equal_on_all_ranks():
    with pytest.raises(ModelError, match="different KV-cache specs"):
        group_layers(
            [{"a": spec()}, {"a": spec(num_kv_heads=1)}], block_size=SIZE, max_model_len=64
        )


@pytest.mark.parametrize(
    ("window", "chunk_size"), [(0, -1), (-1, 0), (0, 1.5), (0, True), (0, "8"), (32, 64)]
)
def test_a_layer_with_an_invalid_window_or_chunk_size_is_rejected(window, chunk_size):
    with pytest.raises(ModelError, match=r"layer1 has sliding_window=.* and chunk_size="):
        group(spec(), spec(window, chunk_size=chunk_size))


def test_a_chunk_size_of_at_least_max_model_len_counts_as_full_attention():
    (first,) = group(spec(), spec(chunk_size=1 << 80))
    assert first.spec == spec()


def test_layers_with_different_block_sizes_are_rejected():
    with pytest.raises(ModelError, match="layer0: 16; layer1: 8"):
        group(spec(), spec(block_size=8))
