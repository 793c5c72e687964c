from itertools import product

import pytest

from dovetail.interfaces import FullAttentionSpec, NoCacheSpec, StateSpec
from dovetail.kv_cache.kinds import CacheKind, kind_of

SIZE = 4


def full(window=0, chunk=0):
    return FullAttentionSpec(
        block_size=SIZE,
        num_kv_heads=1,
        head_size=1,
        dtype="float32",
        sliding_window=window,
        chunk_size=chunk,
    )


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (full(), CacheKind(SIZE)),
        (full(9), CacheKind(SIZE, 9)),
        (full(chunk=8), CacheKind(SIZE, 8, is_chunked=True)),
        (StateSpec(block_size=SIZE, num_bytes=8), CacheKind(SIZE, positional=False)),
        (StateSpec(block_size=SIZE, num_bytes=8, snapshots=True), CacheKind(SIZE, 2)),
        (NoCacheSpec(block_size=SIZE), CacheKind(SIZE)),
    ],
)
def test_the_cache_kind_of_a_layer_follows_from_its_cache_spec(spec, kind):
    assert kind_of(spec) == kind


@pytest.mark.costly
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9, 13])
@pytest.mark.parametrize("num_tokens", range(20))
def test_a_sliding_window_needs_only_the_blocks_of_its_positions(window, num_tokens):
    seen = [p for p in range(num_tokens + 1) if num_tokens - window < p]
    assert CacheKind(SIZE, window).first_needed(num_tokens) == min(seen) // SIZE


@pytest.mark.costly
@pytest.mark.parametrize("chunk", [4, 8, 12, 6])
@pytest.mark.parametrize("num_tokens", range(30))
def test_chunked_attention_needs_only_the_blocks_of_the_current_chunk(chunk, num_tokens):
    kind = CacheKind(SIZE, chunk, is_chunked=True)
    seen = [p for p in range(num_tokens + 1) if p // chunk == num_tokens // chunk]
    assert kind.first_needed(num_tokens) == min(seen) // SIZE
    for num_step_tokens in range(1, 9):
        held = kind.num_positions(num_tokens + num_step_tokens) - kind.first_needed(num_tokens)
        assert held <= kind.max_blocks(num_tokens + num_step_tokens, num_step_tokens)


def test_a_state_is_resumed_from_the_snapshot_before_the_next_token():
    kind = kind_of(StateSpec(block_size=SIZE, num_bytes=8, snapshots=True))
    assert [kind.first_needed(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def naive(kind, cached, limit):
    """Return the longest prefix for which the next token needs only cached blocks."""
    return max(
        n for n in range(limit + 1) if all(cached[p] for p in range(kind.first_needed(n * SIZE), n))
    )


@pytest.mark.parametrize(
    "kind",
    [
        CacheKind(SIZE),
        *(CacheKind(SIZE, w) for w in (1, 2, 4, 5, 6, 9, 40)),
        *(CacheKind(SIZE, chunk, is_chunked=True) for chunk in (4, 8, 12, 40)),
    ],
)
def test_a_prefix_can_be_resumed_if_the_blocks_it_needs_are_cached(kind):
    for cached in product([0, 7], repeat=7):
        for maximum in range(8):
            assert kind.resumable(cached, maximum) == naive(kind, cached, maximum), (
                cached,
                maximum,
            )


def test_a_state_without_snapshots_cannot_be_resumed():
    kind = CacheKind(SIZE, positional=False)
    assert kind.resumable([7, 7], 2) == kind.first_needed(9) == 0
