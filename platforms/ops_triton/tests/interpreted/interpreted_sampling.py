"""Sort keys, top-k, top-p and noise of Triton's sampling, interpreted and compared with Python."""

import math
from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl

from dovetail.interfaces.ops import DrawColumns
from dovetail_devkit.ops.draw import chi_squared
from dovetail_devkit.ops.drawing_law import DrawParams, probabilities
from dovetail_devkit.triton.traffic import count_traffic
from dovetail_ops_triton.kernels import best_columns, drawing
from dovetail_ops_triton.kernels.cuts import cuts_kernel
from dovetail_ops_triton.kernels.order import column_of, image_of, number_of, sort_key_of
from dovetail_ops_triton.ops import TritonOps

INF = math.inf
SPECIAL = [-INF, -3e38, -1.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 1.0000001, 3e38, INF, math.nan]
M32 = 0xFFFFFFFF


def normal(*shape, scale=1.0, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def columns_of(all_settings, *, seeds=None, positions=None, vocab_size):
    counted = range(len(all_settings))
    return DrawColumns(
        temperature_R=torch.tensor([settings.temperature for settings in all_settings]),
        top_k_R=torch.tensor(
            [settings.top_k or vocab_size for settings in all_settings], dtype=torch.int32
        ),
        top_p_R=torch.tensor([settings.top_p for settings in all_settings]),
        min_p_R=torch.tensor([settings.min_p for settings in all_settings]),
        seeds_R=torch.tensor(list(seeds or counted)),
        positions_R=torch.tensor(list(positions or counted)),
    )


@triton.jit
def order_kernel(x_ptr, image_ptr, number_ptr, column_ptr, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    image = image_of(tl.load(x_ptr + lanes))
    tl.store(image_ptr + lanes, image)
    tl.store(number_ptr + lanes, number_of(image))
    tl.store(column_ptr + lanes, column_of(sort_key_of(image, lanes)))


def test_mapping_floats_to_integers_preserves_their_order_and_is_invertible():
    numbers = torch.tensor([*SPECIAL, *[-math.nan] * 4])
    image = torch.zeros(16, dtype=torch.int32)
    back, column = torch.zeros(16), torch.zeros(16, dtype=torch.int64)
    order_kernel[(1,)](numbers, image, back, column, SIZE=16)
    images = image.tolist()
    assert images[:12] == sorted(images[:12]) and images[4] == images[5]
    assert len(set(images)) == 11 and set(images[11:]) == {2**31 - 2}
    assert torch.equal(back[:11], numbers[:11]) and back[11:].isnan().all()
    assert column.tolist() == list(range(16))


def kept_by_cuts(logits_RV, all_settings):
    """Return the columns of each row that the kernel keeps."""
    num_rows, vocab_size = logits_RV.shape
    columns = columns_of(all_settings, vocab_size=vocab_size)
    cuts, counts = torch.zeros(2, num_rows, dtype=torch.int64)
    candidates = torch.zeros(num_rows, drawing.CANDIDATES, dtype=torch.int64)
    block = min(drawing.CUT_BLOCK, triton.next_power_of_2(vocab_size))
    limits = (columns.temperature_R, columns.top_k_R, columns.top_p_R, columns.min_p_R)
    cuts_kernel[(num_rows,)](
        logits_RV,
        *limits,
        cuts,
        counts,
        candidates,
        logits_RV.stride(0),
        vocab_size,
        drawing.deviations_of(vocab_size),
        BLOCK=block,
        CANDIDATES=drawing.CANDIDATES,
    )
    bits = (logits_RV + 0.0).view(torch.int32)
    images = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    sort_keys = (images << 32) | (M32 - torch.arange(vocab_size))
    return [set(row.nonzero().flatten().tolist()) for row in sort_keys >= cuts[:, None]]


ROWS = {
    "normal": normal(1, 700, scale=3.0, seed=2)[0],
    "few values": normal(1, 700, scale=2.0, seed=3)[0].round(),
    "bfloat16": normal(1, 700, scale=2.0, seed=4)[0].bfloat16().float(),
    "all equal": torch.full((700,), 0.25),
    "zeros of both signs": normal(1, 700, seed=5)[0].sign() * 0.0,
    "masked": normal(1, 700, seed=6)[0].masked_fill(torch.arange(700) % 3 > 0, -INF),
    "negative": normal(1, 700, seed=7)[0] - 500.0,
    "far apart": normal(1, 700, seed=8)[0] * 1e30,
    "a peak": normal(1, 700, seed=9)[0].index_fill(0, torch.tensor([431]), 60.0),
    "small": normal(1, 700, seed=10)[0] * 1e-39,
}
SETTINGS = [
    DrawParams(top_k=1),
    DrawParams(top_k=5, temperature=0.7),
    DrawParams(top_k=333),
    DrawParams(top_p=0.31, temperature=1.7),
    DrawParams(top_p=0.97),
    DrawParams(min_p=0.21),
    DrawParams(top_k=50, top_p=0.83, min_p=0.011, temperature=1.3),
]


@pytest.mark.parametrize("row", ROWS)
def test_top_k_top_p_and_min_p_keep_the_tokens_that_their_definitions_require(row):
    logits_RV = ROWS[row].expand(len(SETTINGS), -1).contiguous()
    kept = kept_by_cuts(logits_RV, SETTINGS)
    for settings, columns in zip(SETTINGS, kept, strict=True):
        probs = probabilities(ROWS[row].tolist(), settings)
        due = {column for column, prob in enumerate(probs) if prob > 0}
        # Tokens of probability 0 may be kept; they are never sampled.
        extra = {column for column in columns - due if probs[column] == 0}
        weightless = {
            c for c in extra if ROWS[row][c] < ROWS[row].max() - 80 * settings.temperature
        }
        assert due <= columns and extra == weightless, settings
        if settings.top_k:
            assert len(columns) <= settings.top_k


def test_top_k_and_top_p_keep_the_first_of_equal_tokens_in_several_tiles():
    """Top-k keeps one of many tokens with equal logits. Top-p may drop it, but must not keep
    others."""
    row = normal(1, 2 * drawing.CUT_BLOCK + 100, seed=11)[0].round()
    num_better = int((row > 1).sum())
    all_settings = [
        DrawParams(top_k=num_better + 1, top_p=0.9999999),
        DrawParams(top_k=num_better + 1500),
        DrawParams(top_k=num_better + 1500, top_p=0.9),
    ]
    equals = (row == 1).nonzero().flatten().tolist()
    better = set((row > 1).nonzero().flatten().tolist())
    kept = kept_by_cuts(row.expand(3, -1).contiguous(), all_settings)
    assert kept[0] == better | {equals[0]} and kept[1] == better | set(equals[:1500])
    probs = probabilities(row.tolist(), all_settings[2])
    due = {column for column, prob in enumerate(probs) if prob > 0}
    # The rounding of a float32 sum may add or remove one token.
    assert len(kept[2] ^ due) <= 1 and better < kept[2] < kept[1]


def test_top_k_and_top_p_are_correct_for_a_whole_vocabulary():
    vocab_size = 151_936
    logits_RV = normal(1, vocab_size, scale=2.5, seed=12)
    (best,) = kept_by_cuts(logits_RV, [DrawParams(top_k=1000)])
    assert best == set(logits_RV[0].topk(1000).indices.tolist())
    (likely,) = kept_by_cuts(logits_RV, [DrawParams(top_p=0.6)])
    probs, order = logits_RV[0].double().softmax(-1).sort(descending=True)
    expected = int((probs.cumsum(0) < 0.6).sum()) + 1
    # Float32 sums may move the limit by one or two of ten thousand tokens.
    assert abs(len(likely) - expected) <= 2
    assert likely <= set(order[: expected + 2].tolist())


NUM_COLUMNS = 5000
CANDIDATE_ROWS = {
    "normal": normal(1, NUM_COLUMNS, scale=2.0, seed=21)[0],
    "equal numbers": normal(1, NUM_COLUMNS, scale=2.0, seed=22)[0].round(),
    "infinite": normal(1, NUM_COLUMNS, seed=25)[0].index_fill(0, torch.tensor([431, 4999]), INF),
    "skewed": normal(1, NUM_COLUMNS, seed=26)[0].exp() * 3,
}
CANDIDATE_SETTINGS = [*SETTINGS[1:], DrawParams(top_k=900, top_p=0.999)]


@pytest.mark.parametrize("row", CANDIDATE_ROWS)
def test_candidates_give_the_same_tokens_as_the_whole_row(row, monkeypatch):
    logits_RV = CANDIDATE_ROWS[row].expand(len(CANDIDATE_SETTINGS), -1).contiguous()
    columns = columns_of(CANDIDATE_SETTINGS, vocab_size=NUM_COLUMNS)
    tokens_R = TritonOps().draw_tokens(logits_RV, columns)
    monkeypatch.setattr(drawing, "deviations_of", lambda vocab_size: 1e30)  # no candidates
    assert torch.equal(tokens_R, TritonOps().draw_tokens(logits_RV, columns))


def test_a_row_with_few_allowed_tokens_has_no_other_tokens_as_candidates():
    allowed_V = torch.arange(NUM_COLUMNS) % 50 == 3
    logits_RV = normal(4, NUM_COLUMNS, seed=23).masked_fill(~allowed_V, -INF)
    settings = [DrawParams(top_k=7), DrawParams(top_p=0.9), DrawParams(min_p=0.2)]
    kept = kept_by_cuts(logits_RV, [*settings, DrawParams(top_k=300)])
    assert kept[0] == set(logits_RV[0].topk(7).indices.tolist())
    assert all(columns <= set(allowed_V.nonzero().flatten().tolist()) for columns in kept[1:3])
    assert len(kept[3]) == 300


def test_the_usual_filters_read_the_logits_twice():
    """The first read finds the distribution, and the second one collects candidates."""
    logits_RV = normal(2, 60_000, scale=2.5, seed=27)
    columns = columns_of([DrawParams(top_k=50, top_p=0.9)] * 2, vocab_size=60_000)
    with count_traffic() as traffic:
        TritonOps().draw_tokens(logits_RV, columns)
    assert traffic.requested_bytes < 2.8 * logits_RV.nbytes


@triton.jit
def noise_kernel(seeds_ptr, positions_ptr, words_ptr, noise_ptr, SIZE: tl.constexpr):
    row = tl.program_id(0)
    lanes = tl.arange(0, SIZE)
    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + row)
    words = drawing.noise_words(seed, position, lanes)
    for i in tl.static_range(4):
        offsets = (row * 4 + i) * SIZE + lanes
        tl.store(words_ptr + offsets, words[i].to(tl.int64))
        tl.store(noise_ptr + offsets, drawing.gumbel(words[i]))


def noise_of(seeds, positions, size):
    """Return random words and noise, both [rows, 4, size]."""
    words = torch.zeros(len(seeds), 4, size, dtype=torch.int64)
    noise = torch.zeros(len(seeds), 4, size)
    arguments = torch.tensor(seeds), torch.tensor(positions)
    noise_kernel[(len(seeds),)](*arguments, words, noise, SIZE=size)
    return words, noise


def philox(counter, key):
    """Compute Philox4x32-10 as in Salmon et al. 2011, section 3."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (second >> 32) ^ c1 ^ k0,
            second & M32,
            (first >> 32) ^ c3 ^ k1,
            first & M32,
        )
        k0, k1 = (k0 + 0x9E3779B9) & M32, (k1 + 0xBB67AE85) & M32
    return [c0, c1, c2, c3]


def test_the_random_generator_equals_the_published_philox():
    assert philox((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    seeds, positions = [0, 7, -1, 1 << 40], [0, 3, 1 << 33, 12]
    words, _ = noise_of(seeds, positions, 8)
    for r, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for counter in range(8):
            counters = (counter, position & M32, position >> 32, 0)
            expected = philox(counters, (seed & M32, seed >> 32 & M32))
            assert words[r, :, counter].tolist() == expected


def test_noise_is_gumbel_distributed_and_samples_by_probability():
    num_rows, size, vocab_size = 24, 1024, 16
    seeds = [5] * (num_rows // 2) + list(range(num_rows // 2))
    _, noise = noise_of(seeds, range(num_rows), size)
    natural = noise.double() * math.log(2)
    # The mean is Euler's constant, the variance pi²/6; 4 standard errors of 98304 numbers.
    count = natural.numel()
    assert abs(natural.mean() - 0.5772156649) < 4 * 1.2825 / count**0.5
    assert abs(natural.var() - math.pi**2 / 6) < 4 * 1.6449 * (4.4 / count) ** 0.5
    logits = normal(1, vocab_size, scale=1.5, seed=14)[0]
    sampled = (natural.view(-1, vocab_size) + logits).argmax(-1)
    counts = sampled.bincount(minlength=vocab_size).tolist()
    assert sum(counts) == 6144
    assert abs(chi_squared(counts, logits.double().softmax(-1).tolist())) < 4


def test_the_greatest_noise_values_are_distinct():
    """The words nearest to 0 give distinct noise values, down to probability 2^-33."""
    words = torch.tensor([0, 1, 2, 3, 1000, 2**31, M32 - 1, M32])
    actual = torch.zeros(8)
    gumbel_kernel[(1,)](words, actual, SIZE=8)
    uniform = (words.double() + 0.5) / 2**32
    expected = -(-(-uniform).log1p()).log2()
    assert torch.allclose(actual[:6].double(), expected[:6], rtol=1e-5)
    assert actual.isfinite().all() and all(a > b for a, b in pairwise(actual[:7].tolist()))


@triton.jit
def gumbel_kernel(words_ptr, noise_ptr, SIZE: tl.constexpr):
    lanes = tl.arange(0, SIZE)
    words = tl.load(words_ptr + lanes).to(tl.uint32)
    tl.store(noise_ptr + lanes, drawing.gumbel(words))


@pytest.mark.parametrize("parts", [(1, 5), (2, 3), (5, 1)], ids=str)
def test_splitting_a_row_does_not_change_results(parts, monkeypatch):
    vocab_size = 4 * best_columns.TILE + 100
    logits_RV = normal(3, vocab_size, seed=15)
    # The equal numbers are in different tiles, and two of them in the same lane.
    logits_RV[0, [7, 7 + 2 * best_columns.TILE, 9000, 16000]] = 9.0
    logits_RV[1, -1] = 9.5
    all_settings = [
        DrawParams(temperature=0.0),
        DrawParams(),
        DrawParams(temperature=2.0, top_k=4000),
    ]
    columns = columns_of(all_settings, vocab_size=vocab_size)
    ops = TritonOps()
    best, sampled = ops.best_tokens(logits_RV), ops.draw_tokens(logits_RV, columns)
    for module in (best_columns, drawing):
        monkeypatch.setattr(module, "share_out", lambda rows, vocab: parts)
    assert torch.equal(ops.best_tokens(logits_RV), best) and best[0] == sampled[0] == 7
    assert torch.equal(ops.draw_tokens(logits_RV, columns), sampled)


def test_the_noise_of_different_vocabulary_tiles_is_independent():
    vocab_size, num_rows = 3 * best_columns.TILE, 12
    columns = columns_of([DrawParams()] * num_rows, vocab_size=vocab_size)
    sampled = TritonOps().draw_tokens(torch.zeros(num_rows, vocab_size), columns)
    # Twelve samples of three equal tokens omit one in 1 of 40 cases, two in 1 of 170,000 cases.
    assert len((sampled // best_columns.TILE).unique()) >= 2
    # The four words of a counter are used by the quarters of a tile.
    assert len((sampled % best_columns.TILE * 4 // best_columns.TILE).unique()) >= 2
    assert len((sampled % best_columns.TILE).unique()) >= 10


def test_the_parts_of_a_row_cover_the_whole_vocabulary():
    for num_rows in (1, 2, 7, 100, 5000):
        for vocab_size in (1, 4096, 4097, 32_000, 151_936, 1_000_000):
            num_parts, num_tiles = best_columns.share_out(num_rows, vocab_size)
            covered = num_parts * num_tiles * best_columns.TILE
            assert covered >= vocab_size and num_parts <= best_columns.MAX_PARTS
            assert covered - num_tiles * best_columns.TILE < vocab_size, "a part is empty"


def test_best_tokens_treats_zeros_of_both_signs_as_equal():
    logits_RV = torch.tensor([[-0.0, 0.0, -1.0], [0.0, -0.0, -1.0]])
    assert TritonOps().best_tokens(logits_RV).tolist() == [0, 0]
