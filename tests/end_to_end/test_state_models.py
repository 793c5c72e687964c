"""Recurrent models are served with the default options, and unsupported options are rejected."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import (
    AutoModel,
    Mamba2Config,
    Mamba2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from dovetail import LLM
from dovetail.errors import DovetailError
from dovetail_devkit.small_configs import MAMBA2, QWEN3_NEXT, RECURRENT_GEMMA
from end_to_end.checkpoints import OPTIONS
from end_to_end.quantized_checkpoints import GREEDY
from parity.random_weights import fill

OWN = OPTIONS | {"dtype": "float32", "load_format": "auto", "skip_tokenizer_init": True}
OWN |= {"block_size": 16, "max_model_len": 600}
LONG = [(7 * i) % 300 for i in range(300)]
PROMPTS = [LONG[:5], LONG[:70], LONG, LONG[3:4]]


@pytest.fixture(scope="module", params=["mamba2", "qwen3_next", "recurrent_gemma"])
def folder(request, tmp_path_factory):
    model = {
        "mamba2": lambda: Mamba2ForCausalLM(Mamba2Config(**MAMBA2)),
        "qwen3_next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**QWEN3_NEXT)),
        "recurrent_gemma": lambda: RecurrentGemmaForCausalLM(
            RecurrentGemmaConfig(**RECURRENT_GEMMA)
        ),
    }[request.param]().eval()
    fill(model, torch.Generator().manual_seed(1))
    path = tmp_path_factory.mktemp("states")
    model.save_pretrained(path)
    return path


def tokens_of(llm, prompts=PROMPTS):
    done = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in done]


@pytest.fixture(scope="module")
def expected(folder):
    with LLM(folder, **OWN) as llm:
        return [tokens_of(llm, [prompt])[0] for prompt in PROMPTS]


@pytest.mark.costly
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True, "max_num_batched_tokens": 33},
        {"enable_prefix_caching": False, "max_num_seqs": 2},
        {"executor_backend": "mp"},
    ],
)
def test_requests_in_a_batch_get_the_same_tokens_as_alone(folder, expected, options):
    with LLM(folder, **OWN | options) as llm:
        assert tokens_of(llm) == expected


@pytest.mark.costly
def test_a_cached_prefix_is_continued_from_its_state(folder, expected):
    with LLM(folder, **OWN | {"max_num_batched_tokens": 64}) as llm:
        tokens_of(llm, [LONG])
        (output,) = llm.generate([LONG], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == 256
        assert list(output.outputs[0].token_ids) == expected[2]
        # A request that computes the same prefix at the same time is not affected.
        assert tokens_of(llm) == expected


@pytest.mark.costly
@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}])
def test_recurrent_models_run_in_bfloat16_and_with_int8_weights(folder, options):
    with LLM(folder, **OWN | {"dtype": "bfloat16"} | options) as llm:
        assert [len(row) for row in tokens_of(llm)] == [6] * 4


def test_compilation_is_rejected_for_recurrent_models(folder):
    with pytest.raises(DovetailError, match="models with recurrent layers, such as linear"):
        LLM(folder, **OWN | {"compile_level": "as_is"})


@pytest.mark.costly
def test_states_of_aborted_requests_are_not_read(folder, expected):
    """The blocks of an aborted request contain its states, which later requests must not read."""
    with LLM(folder, **OWN | {"max_num_seqs": 1}) as llm:
        for number in range(3):
            other = [(11 * i + number) % 300 for i in range(90)]
            llm.llm_engine.add_request(f"gone {number}", other, GREEDY)
            llm.llm_engine.step()
            llm.llm_engine.abort_request([f"gone {number}"])
        assert tokens_of(llm) == expected


@pytest.mark.costly
def test_a_kv_connector_stores_and_loads_recurrent_states(folder, expected):
    """The second and third prompt continue the state that the connector has stored."""
    with LLM(folder, **OWN | {"kv_connector": "memory"}) as llm:
        for num_cached in (0, 256, 256):
            assert llm.reset_prefix_cache()
            (output,) = llm.generate([LONG], GREEDY, use_tqdm=False)
            assert output.num_cached_tokens == num_cached
            assert list(output.outputs[0].token_ids) == expected[2]


@pytest.mark.costly
def test_embeddings_are_the_hidden_states_of_the_last_tokens(folder):
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with LLM(folder, **OWN | {"runner": "pooling"}) as llm:
        outputs = llm.embed(PROMPTS, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.no_grad():
            # With a cache, transformers needs equal lru_width and hidden_size.
            hidden_TD = model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
        expected_D = hidden_TD[-1] / hidden_TD[-1].norm()
        assert output.outputs.embedding == pytest.approx(expected_D.tolist(), abs=1e-5)


@pytest.mark.costly
def test_prefixes_that_end_near_a_block_boundary_are_continued_in_a_full_cache(folder):
    """Prompts end before, at and after a block of states, with aborts and preemptions."""
    base = [(7 * i + i // 13) % 300 for i in range(590)]
    prompts = [base[:length] for length in (255, 256, 257, 511, 512, 513, 1, 580)]
    prompts += [[*base[:cut], 5, *base[cut + 1 : cut + 9]] for cut in (255, 256, 257)]
    with LLM(folder, **OWN | {"enable_prefix_caching": False}) as llm:
        expected = [tokens_of(llm, [prompt])[0] for prompt in prompts]
    # Room for one of the longest requests and little more.
    kind = json.loads((folder / "config.json").read_text("utf-8"))["model_type"]
    num_blocks = {"mamba2": 4, "qwen3_next": 48, "recurrent_gemma": 20}[kind]
    full = {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": num_blocks}
    with LLM(folder, **OWN | full | {"max_num_batched_tokens": 100}) as llm:
        engine = llm.llm_engine
        for number in range(3):
            engine.add_request(f"gone {number}", base[: 300 + number], GREEDY)
            for _ in range(number + 1):
                engine.step()
            engine.abort_request([f"gone {number}"])
            assert tokens_of(llm, prompts) == expected
        assert engine.last_stats.num_preemptions > 0
