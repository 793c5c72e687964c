from array import array
from itertools import combinations
from random import Random

import pytest

from dovetail.kv_cache.hashing import (
    PrefixHasher,
    block_hash,
    content_key,
    extend_hashes,
    root_hash,
)
from dovetail.request import EncoderInput, EngineCoreRequest, Request
from dovetail.sampling_params import SamplingParams

SIZE = 4


def hashes(tokens=range(12), *, size=SIZE, **changes):
    requested = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=tuple(tokens),
        sampling_params=SamplingParams(),
        max_tokens=8,
        **changes,
    )
    new_request = Request(requested, max_model_len=64)
    extend_hashes(new_request, len(requested.prompt_token_ids) // size, size)
    return new_request.block_hashes


def image(position, num_tokens, name=b"cat"):
    return EncoderInput(position=position, num_tokens=num_tokens, content_hash=name)


def test_a_block_hash_covers_the_tokens_of_the_block_and_all_previous_tokens():
    plain = hashes()
    assert len(plain) == len(set(plain)) == 3
    assert hashes(range(8)) == plain[:2]
    last = hashes([*range(11), 99])
    assert last[:2] == plain[:2] and last[2] != plain[2]
    first = hashes([99, *range(1, 12)])
    assert not set(first) & set(plain)


def test_hashing_more_blocks_of_a_request_keeps_the_earlier_hashes():
    requested = hashes(range(8))
    new_request = Request(
        EngineCoreRequest(
            request_id="r",
            prompt_token_ids=tuple(range(8)),
            sampling_params=SamplingParams(),
            max_tokens=8,
        ),
        max_model_len=64,
    )
    extend_hashes(new_request, 1, SIZE)
    extend_hashes(new_request, 2, SIZE)
    extend_hashes(new_request, 1, SIZE)
    assert new_request.block_hashes == requested


SALTS = [("", ""), ("a", ""), ("", "a"), ("ab", "c"), ("a", "bc"), ("abc", ""), ("a\0", "")]


def test_salt_and_adapter_change_the_block_hash():
    roots = [root_hash(SIZE, salts) for salts in SALTS] + [root_hash(SIZE + 1, SALTS[0])]
    assert len(set(roots)) == len(roots)
    actual = [hashes(cache_salt=salt, lora_id=lora) for salt, lora in SALTS]
    for item, other in combinations(actual, 2):
        assert not set(item) & set(other)


def test_tenant_and_deadline_do_not_change_the_block_hash():
    assert hashes(tenant="a", deadline_ns=5) == hashes()


def test_a_lone_surrogate_is_a_valid_salt():
    assert root_hash(SIZE, ("\ud800", "")) != root_hash(SIZE, ("\ud801", ""))


def test_the_block_size_changes_the_block_hash():
    assert not set(hashes(size=4)) & set(hashes(size=2))


@pytest.mark.parametrize(
    ("item", "first_touched"),
    [(image(0, 2), 0), (image(3, 1), 0), (image(4, 4), 1), (image(7, 3), 1)],
)
def test_a_multimodal_input_changes_the_block_hashes_from_its_first_token_on(item, first_touched):
    plain, with_it = hashes(), hashes(encoder_inputs=(item,))
    same = [entry == other for entry, other in zip(plain, with_it, strict=True)]
    assert same == [block < first_touched for block in range(3)]


def test_the_hash_position_and_length_of_a_multimodal_input_change_the_block_hash():
    items = [image(4, 3), image(5, 3), image(4, 2), image(4, 3, b"dog"), image(4, 3, b"ca")]
    by_name = {hashes(encoder_inputs=(item,))[1] for item in items}
    assert len(by_name) == len(items)


def test_a_multimodal_input_after_a_block_does_not_change_the_hash_of_the_block():
    assert content_key((image(8, 4),), 4, 8) == b""
    assert content_key((image(0, 4),), 4, 8) == b""
    assert content_key((image(2, 4),), 4, 8) != b""


def test_names_of_adjacent_multimodal_inputs_are_hashed_unambiguously():
    first = content_key((image(0, 1, b"ab"), image(1, 1, b"c")), 0, 4)
    other = content_key((image(0, 1, b"a"), image(1, 1, b"bc")), 0, 4)
    assert first != other


def test_the_inputs_of_a_block_hash_are_encoded_unambiguously():
    tokens = array("i", range(SIZE))
    assert block_hash(b"p" * 32, tokens) != block_hash(b"p" * 32, tokens, b"x")


@pytest.mark.parametrize("seed", range(6))
def test_copied_block_hashes_equal_computed_block_hashes(seed):
    rng, hasher = Random(seed), PrefixHasher(SIZE)
    stem = [rng.randrange(9) for _ in range(60)]
    for _ in range(60):
        same = rng.randrange(61)
        tokens = stem[:same] + [rng.randrange(9) for _ in range(60 - same)]
        changes = {
            "cache_salt": rng.choice(["", "a"]),
            "lora_id": rng.choice(["", "a"]),
            "encoder_inputs": rng.choice([(), (), (image(rng.randrange(50), 8),)]),
        }
        requested = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=tuple(tokens),
            sampling_params=SamplingParams(),
            max_tokens=8,
            **changes,
        )
        new_request = Request(requested, max_model_len=64)
        for num_blocks in sorted(rng.sample(range(16), 3)):
            hasher.extend(new_request, num_blocks)
        hasher.extend(new_request, 15)
        assert new_request.block_hashes == hashes(tokens, **changes)


def test_copied_block_hashes_do_not_count_toward_the_hashing_limit():
    hasher, created = PrefixHasher(SIZE), []
    for name in "abc":
        requested = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=tuple(range(60)),
            sampling_params=SamplingParams(),
            max_tokens=8,
        )
        created.append(Request(requested, max_model_len=64))
    assert [hasher.extend(created[0], 15, 6) for _ in range(4)] == [6, 6, 3, 0]
    assert hasher.extend(created[1], 15, 6) == hasher.extend(created[2], 15) == 0
    assert (
        created[0].block_hashes
        == created[1].block_hashes
        == created[2].block_hashes
        == hashes(range(60))
    )
