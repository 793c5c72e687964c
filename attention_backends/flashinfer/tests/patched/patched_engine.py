"""An engine generates the same tokens with this backend and with the `torch` backend.

test_flashinfer_attention.py starts these tests in a separate process.
"""

from __future__ import annotations

import pytest
from cpu_backends import BACKENDS, OnCpu
from fake_gpu import PARTS, fake_device, on_fake_device

from dovetail import LLM, SamplingParams
from dovetail_devkit.contexts import SMALL_ENGINE
from dovetail_devkit.tiny_model import write_tiny_llama

PROMPTS = [[1, 2, 3, 5, 7], list(range(3, 40)), [9] * 20, [4]]
NUM_TOKENS = 20
NUM_SAMPLED = 10
HEAD_SIZE = 32
"""Smaller than all head sizes of the kernels, so that heads are padded."""


def generate(model, backend, **options):
    """Return the tokens of all prompts, and the counts of steps with and without a graph."""
    options |= {"dtype": "bfloat16", "block_size": 16, "skip_tokenizer_init": True}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    with LLM(model, attention_backend=backend, **SMALL_ENGINE | options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        counts = llm.llm_engine.client.core.executor._worker._runner.graph_counts
    return [list(output.outputs[0].token_ids) for output in outputs], counts


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model"), head_dim=HEAD_SIZE)


@pytest.fixture(scope="module")
def expected(model):
    return generate(model, "torch")[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_generates_the_same_tokens_as_with_the_torch_backend(model, expected, backend):
    """Prompts are cut into chunks, and steps contain chunks and decodes."""
    assert generate(model, backend)[0] == expected


def generate_on_fake_device(model, backend, **options):
    with fake_device():
        return generate(model, backend, num_gpu_blocks_override=20, **PARTS, **options)


@pytest.mark.sampled(NUM_SAMPLED)
@pytest.mark.parametrize(
    ("backend", "mode"),
    [
        *((backend, "full_and_piecewise") for backend in BACKENDS),
        (OnCpu, "piecewise"),
        (OnCpu, "none"),
    ],
)
def test_graphs_generate_the_same_tokens_as_eager_steps(model, expected, backend, mode):
    tokens, counts = generate_on_fake_device(model, on_fake_device(backend), graph_mode=mode)
    assert tokens == expected
    assert (counts.replayed > 10) == (mode != "none")
    assert (counts.eager == 0) == (mode != "none")
