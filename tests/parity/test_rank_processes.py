"""Ranks as processes with native CPU kernels are as close to float32 as one rank.

These tests compare only the outputs of engines. `test_rank_parity.py` compares every logit, with
torch operations.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.errors import ConfigError
from dovetail_cpu.native_library import probe_fast
from parity.checkpoints import VOCAB_SIZE, Checkpoint, make_checkpoint
from parity.commit_seed import commit_seed

NAME = "qwen2: biases, tied, 6/2 heads"
PROMPT_LENS = (120, 33, 1, 64)
NUM_NEW = 16
ASKED = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, prompt_logprobs=0)
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "use_tqdm_on_load": False,
    "max_model_len": 160,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_threads": 1,
    "num_gpu_blocks_override": 100,
}
native = pytest.mark.skipif(
    not probe_fast().usable, reason="native kernels are not available on this machine"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(NAME, tmp_path_factory.mktemp("checkpoint"), commit_seed()[0])


def prompt_logprobs(folder: Path, **options: Any) -> torch.Tensor:
    """Return the log-probabilities of all prompt tokens of all prompts, concatenated."""
    source = random.Random(commit_seed()[0])
    prompts = [[source.randrange(VOCAB_SIZE) for _ in range(count)] for count in PROMPT_LENS]
    with LLM(str(folder), **(OPTIONS | options)) as llm:
        outputs = llm.generate(prompts, ASKED, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == NUM_NEW for output in outputs)
    return torch.tensor(
        [
            entry[token].logprob
            for prompt, output in zip(prompts, outputs, strict=True)
            for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        ]
    )


@pytest.mark.sampled(4)
@native
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_native_ranks_are_as_close_to_float32_as_one_rank(
    checkpoint: Checkpoint, quantization: str | None, note: Callable[[str], None]
) -> None:
    exact = prompt_logprobs(checkpoint.folder, dtype="float32")
    kwargs = {"dtype": "bfloat16", "quantization": quantization}
    first = prompt_logprobs(checkpoint.folder, **kwargs)
    second = prompt_logprobs(checkpoint.folder, **kwargs, tensor_parallel_size=2)
    apart_one, apart_two = ((actual - exact).abs().mean().item() for actual in (first, second))
    kind = quantization or "bf16"
    note(f"{kind}: mean |Δ log p| of one rank {apart_one:.4f}, of two {apart_two:.4f}")
    assert 0 < apart_two < 1.5 * apart_one
    assert not torch.equal(first, second), (
        "two ranks must round differently from one rank: check that two ranks ran"
    )


def test_a_model_with_indivisible_heads_is_rejected_at_startup(checkpoint: Checkpoint) -> None:
    with pytest.raises(
        ConfigError, match=r"3 is not possible: num_attention_heads=6 .* Use 1, 2, 6"
    ):
        LLM(str(checkpoint.folder), **OPTIONS, dtype="float32", tensor_parallel_size=3)
