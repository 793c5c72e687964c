"""An engine with this backend in float16 generates the tokens of the backend `torch` in float32.

Started by test_flash_attn_attention.py in a process of its own.
"""

from __future__ import annotations

import pytest
from cpu_backends import BACKENDS, BLOCK_SIZE

from dovetail import LLM, SamplingParams
from dovetail_devkit.contexts import SMALL_ENGINE
from dovetail_devkit.tiny_model import write_tiny_llama

PROMPTS = [[1, 2, 3, 5, 7], list(range(3, 40)), [9] * 20, [4]]
NUM_TOKENS = 20
HEAD_SIZE = 24
"""Smaller than all head sizes of the backend, so that heads are padded."""


def generate(model, backend, dtype):
    options = SMALL_ENGINE | {
        "attention_backend": backend,
        "dtype": dtype,
        "block_size": BLOCK_SIZE,
        "skip_tokenizer_init": True,
    }
    with LLM(model, **options) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model"), head_dim=HEAD_SIZE)


@pytest.fixture(scope="module")
def expected(model):
    return generate(model, "torch", "float32")


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_generates_the_tokens_of_the_backend_torch(model, expected, backend):
    """Prompts are cut into chunks, and steps contain chunks and decodes."""
    assert generate(model, backend, "float16") == expected
