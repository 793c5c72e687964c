"""On published GGUF files, Dovetail agrees with llama.cpp, and quantized blocks with float32.

Perplexities of llama.cpp are recorded: llama-cpp-python 0.3.36, on the file dequantized to float32.
"""

import math
from pathlib import Path

import numpy as np
import pytest
from assets import fetch

from dovetail import LLM, SamplingParams
from dovetail_gguf.tokenizer import GGUFTokenizer

native_library = pytest.importorskip("dovetail_cpu.native_library")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        not native_library.probe_fast().usable, reason="there are no fast native kernels here"
    ),
]

TEXT = Path(__file__).parents[2] / "LICENSE"
NUM_TOKENS = 1024
MIN_MARGIN = 0.5
LLAMACPP = {"smollm2": 13.965, "gemma3_270m": 9.0632}
"""Perplexity of the first 1,024 tokens of TEXT, by asset."""


def positions(path, ids, **options):
    """Return the log-probability of each token, the most likely token, and its margin."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
    with LLM(str(path), max_model_len=NUM_TOKENS + 16, use_tqdm_on_load=False, **options) as llm:
        (output,) = llm.generate([ids], params, use_tqdm=False)
    rows = output.prompt_logprobs[1:]
    tops = [sorted(row.items(), key=lambda entry: entry[1].rank)[:2] for row in rows]
    return (
        np.array([row[token].logprob for token, row in zip(ids[1:], rows, strict=True)]),
        np.array([first[0] for first, _ in tops]),
        np.array([first[1].logprob - second[1].logprob for first, second in tops]),
    )


@pytest.mark.parametrize("name", list(LLAMACPP))
def test_quantized_blocks_agree_with_float32_and_float32_agrees_with_llama_cpp(name):
    (path,) = fetch(name).glob("*.gguf")
    text = TEXT.read_text(encoding="utf-8")
    ids = list(GGUFTokenizer.from_directory(path).encode(text))[:NUM_TOKENS]
    exact, best, margin = positions(path, ids, dtype="float32")
    assert math.exp(-exact.mean()) == pytest.approx(LLAMACPP[name], rel=1e-3)
    actual, other, _ = positions(path, ids, dtype="bfloat16")
    assert abs(math.expm1(exact.mean() - actual.mean())) < 0.01
    has_margin = margin > MIN_MARGIN
    assert has_margin.mean() > 0.7
    assert (best == other)[has_margin].mean() >= 0.99
