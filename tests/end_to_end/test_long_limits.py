"""Large limits on positions, batch slots and KV blocks cost neither memory nor time until they are
used."""

import json
import logging
import re
import time
from pathlib import Path

import pytest

import dovetail_torch.layers.rotary as rotary
from dovetail import LLM, SamplingParams
from dovetail_cpu.native_library import probe_fast

MIB = 1 << 20
LONG = 1_024_000
TOY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_theta": 10000.0,
}
GREEDY = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@pytest.fixture
def start(tmp_path):
    def build(num_positions, **options):
        config = TOY | {"max_position_embeddings": num_positions}
        (tmp_path / "config.json").write_text(json.dumps(config))
        kwargs = {"dtype": "bfloat16", "num_threads": 1, "platform": "cpu"}
        return LLM(
            tmp_path,
            load_format="dummy",
            skip_tokenizer_init=True,
            use_tqdm_on_load=False,
            **(kwargs | options),
        )

    return build


def resident_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024


def started(start, num_positions, **options):
    """Return the memory and CPU seconds that an engine uses until its first token."""
    before, began = resident_bytes(), time.process_time()
    with start(num_positions, **options) as llm:
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        return resident_bytes() - before, time.process_time() - began


@pytest.mark.costly
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_unused_positions_of_a_large_max_model_len_use_no_memory(start, dtype):
    started(start, 1000, dtype=dtype)  # load all code and libraries first
    short, _ = started(start, 1000, dtype=dtype)
    long, _ = started(start, LONG, dtype=dtype)
    assert long < short + 100 * MIB


@pytest.mark.clock
def test_a_large_max_model_len_does_not_slow_down_startup(start):
    started(start, 1000)
    short = min(started(start, 1000)[1] for _ in range(3))
    long = min(started(start, LONG)[1] for _ in range(3))
    assert long < short + 0.3


@pytest.mark.costly
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_growing_position_table_gives_the_same_tokens_as_a_full_table(start, dtype, monkeypatch):
    """The position table grows while decode steps are replayed or their metadata is advanced."""
    if dtype == "bfloat16" and not probe_fast().usable:
        pytest.skip("native kernels are not available on this machine")
    monkeypatch.setattr(rotary, "_POSITIONS_AT_ONCE", 64)
    prompts = [[(7 * i + seed) % 300 for i in range(50 + seed)] for seed in range(3)]
    params = SamplingParams(temperature=0, max_tokens=100, logprobs=1, ignore_eos=True)

    def answers():
        with start(512, dtype=dtype, max_num_seqs=4, num_gpu_blocks_override=64) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        return [
            (out.outputs[0].token_ids, [dict(step) for step in out.outputs[0].logprobs])
            for out in outputs
        ]

    grown = answers()
    monkeypatch.setattr(rotary, "_POSITIONS_AT_ONCE", 4096)
    assert grown == answers()


def num_blocks(caplog):
    actual = re.findall(r"(\d+) KV blocks of", caplog.text)
    return int(actual[-1])


def test_a_large_cache_keeps_prefixes_and_uses_no_memory_for_unused_blocks(start, caplog):
    caplog.set_level(logging.INFO, "dovetail.engine.start")
    before = resident_bytes()
    prompt = list(range(100))
    with start(256, max_num_seqs=1) as llm:
        blocks = num_blocks(caplog)
        llm.generate([prompt], GREEDY, use_tqdm=False)
        others = [[(i * 13 + seed) % 319 for i in range(200)] for seed in range(1, 60)]
        llm.generate(others, GREEDY, use_tqdm=False)
        (again,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens == 96
    assert resident_bytes() - before < 150 * MIB
    with start(256, max_num_seqs=64):
        assert num_blocks(caplog) > 0.8 * blocks
    assert blocks > 1000 * 17  # many more blocks than one sequence needs
