"""Engines of hybrid models: full attention, sliding windows and states."""

import pytest

from dovetail import LLM, SamplingParams
from dovetail.errors import CapacityError
from dovetail.interfaces import FullAttentionSpec, StateSpec
from dovetail_devkit import FAKES
from dovetail_devkit.contexts import SMALL_ENGINE, write_fake_config
from dovetail_devkit.fakes.worker import FakeWorker
from dovetail_devkit.rows.groups import GroupRows
from dovetail_devkit.rows.state import predict_token

LENGTH, STEP, VOCAB = 512, 64, 97
PARAMS = SamplingParams(max_tokens=6, seed=3, temperature=1.0, detokenize=False, ignore_eos=True)
PROMPTS = [list(range(1, 90)), [*range(1, 50), *range(60, 90)], [5] * 30, list(range(1, 90))]


def full(heads=2, size=8, window=0):
    return FullAttentionSpec(
        block_size=4, num_kv_heads=heads, head_size=size, dtype="float32", sliding_window=window
    )


def state(num_bytes, snapshots=False):
    return StateSpec(block_size=4, num_bytes=num_bytes, snapshots=snapshots)


MIXES = {
    "full and windows": [full(window=32 if i % 6 != 5 else 0) for i in range(12)],
    "full and states": [full() if i % 4 == 3 else state(9_000) for i in range(8)],
    "full and snapshots": [
        full() if i % 4 == 3 else state(4_000, snapshots=True) for i in range(8)
    ],
    "two head sizes": [full(size=16, window=64) if i % 3 else full(size=24) for i in range(9)],
    "everything": [full(), full(size=16, window=64), state(6_000), state(700)] * 2,
}


def needed_bytes(specs):
    total = 0
    for spec in specs:
        if isinstance(spec, StateSpec):
            total += spec.num_bytes * (1 + spec.snapshots)
            continue
        window = spec.sliding_window
        kept = min(LENGTH, window - 1 + STEP) if window else LENGTH
        total += kept * 2 * spec.num_kv_heads * spec.head_size * 4
    return total


def worker_of(specs):
    class MixedWorker(FakeWorker):
        """A worker that checks the cache content that every request reads in each group."""

        row_model_cls = GroupRows

        def get_kv_cache_spec(self):
            super().get_kv_cache_spec()
            return {f"layers.{i}": spec for i, spec in enumerate(specs)}

    return MixedWorker


def start(folder, specs, **changes):
    options = {
        **SMALL_ENGINE,
        "max_model_len": LENGTH,
        "max_num_batched_tokens": STEP,
        "hf_overrides": {"max_position_embeddings": LENGTH},
    }
    return LLM(
        write_fake_config(folder),
        platform=FAKES["platform"],
        worker_cls=worker_of(specs),
        skip_tokenizer_init=True,
        **(options | changes),
    )


def expected(prompt):
    tokens = list(prompt)
    for _ in range(PARAMS.max_tokens):
        tokens.append(predict_token(tokens, PARAMS.seed, VOCAB))
    return tokens[len(prompt) :]


def tokens_of(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("mix", MIXES)
def test_a_cache_of_1_3_times_the_needed_bytes_fits_the_longest_request(tmp_path, mix):
    specs = MIXES[mix]
    memory = int(1.3 * needed_bytes(specs))
    prompt = [token % VOCAB for token in range(LENGTH - 7)]
    with start(tmp_path, specs, kv_cache_memory_bytes=memory) as llm:
        assert tokens_of(llm.generate([prompt], PARAMS)) == [expected(prompt)]


def test_a_cache_too_small_for_the_longest_request_is_rejected(tmp_path):
    specs = MIXES["full and states"]
    memory = int(0.9 * needed_bytes(specs))
    with pytest.raises(CapacityError, match="lower max_model_len to"):
        start(tmp_path, specs, kv_cache_memory_bytes=memory)


@pytest.mark.costly
@pytest.mark.parametrize("ahead", [False, True], ids=["depth 1", "depth 2"])
@pytest.mark.parametrize("mix", MIXES)
def test_tokens_are_correct_with_shared_prefixes_in_a_small_cache(tmp_path, mix, ahead):
    specs = MIXES[mix]
    memory = int(1.3 * needed_bytes(specs))
    with start(tmp_path, specs, async_scheduling=ahead, kv_cache_memory_bytes=memory) as llm:
        for _ in range(2):
            assert tokens_of(llm.generate(PROMPTS, PARAMS)) == [expected(item) for item in PROMPTS]
