"""batch_invariant=True: a request's results are bitwise independent of other requests in its batch.

This module compares tokens and log-probabilities of the same requests in batches of 1, 2, 3, 7, 16
and 32, on one and two threads, with chunked prompts; greedy and sampled.
"""

import json
from random import Random

import pytest
import torch
from safetensors.torch import save_file

from dovetail import LLM, SamplingParams
from dovetail.errors import DovetailError
from dovetail_cpu.native_library import probe_fast
from dovetail_devkit.tiny_model import (
    TINY_EXPERTS,
    TINY_LLAMA,
    llama_shapes,
    qwen3_moe_shapes,
)

pytest.importorskip("dovetail_attn_cpu")
pytest.importorskip("dovetail_models")
pytestmark = pytest.mark.skipif(not probe_fast().usable, reason="native kernels are not usable")

V = 5003  # more tokens than the sampler processes at once
SHAPE = TINY_LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "vocab_size": V,
    "torch_dtype": "bfloat16",
}
BATCHES = [(size, threads) for size in (1, 2, 3, 7, 16, 32) for threads in (1, 2)]


def write(path, config, shapes):
    generator = torch.Generator().manual_seed(9)
    weights = {
        name: (torch.randn(shape, generator=generator) * 0.1 + (len(shape) == 1)).bfloat16()
        for name, shape in shapes.items()
    }
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write(tmp_path_factory.mktemp("invariant"), SHAPE, llama_shapes(SHAPE))


def start(path, **options):
    return LLM(
        str(path),
        skip_tokenizer_init=True,
        max_model_len=128,
        num_gpu_blocks_override=300,
        block_size=16,
        enable_prefix_caching=False,
        **{"batch_invariant": True} | options,
    )


def requests(num_requests, num_tokens):
    """Return prompts and sampling parameters of requests. A third of the requests are greedy."""
    source = Random(17)
    prompts = [
        [source.randrange(V) for _ in range(source.randint(2, 45))] for _ in range(num_requests)
    ]
    draws = ({"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"frequency_penalty": 0.5}, {})
    params = [
        SamplingParams(
            temperature=0.0 if i % 3 == 0 else 0.8,
            seed=i,
            max_tokens=num_tokens,
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=1 if i % 7 == 0 else None,
            **(draws[i % len(draws)] if i % 3 else {}),
        )
        for i in range(num_requests)
    ]
    return prompts, params


def bits(llm, prompts, params):
    """Return all fields of the requests' outputs, so that `==` compares floats exactly."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


def hold(checkpoint, num_requests, num_tokens, batches=BATCHES, **options):
    prompts, params = requests(num_requests, num_tokens)
    expected = None
    for size, threads in batches:
        budget = max(size, 48)  # long prompts are chunked
        with start(
            checkpoint,
            max_num_seqs=size,
            max_num_batched_tokens=budget,
            num_threads=threads,
            **options,
        ) as llm:
            actual = bits(llm, prompts, params)
        expected = expected or actual
        differing = [i for i, (a, b) in enumerate(zip(actual, expected, strict=True)) if a != b]
        assert not differing, f"in batches of {size} on {threads} threads: requests {differing}"


@pytest.mark.costly
def test_outputs_do_not_depend_on_the_batch(checkpoint):
    hold(checkpoint, 33, 5)


@pytest.mark.costly
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_outputs_of_quantized_models_do_not_depend_on_the_batch(checkpoint, quantization):
    hold(checkpoint, 17, 4, batches=[(1, 1), (3, 2), (16, 2)], quantization=quantization)


@pytest.mark.costly
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_outputs_of_experts_do_not_depend_on_the_batch(tmp_path, quantization):
    config = SHAPE | TINY_EXPERTS
    write(tmp_path, config, qwen3_moe_shapes(config))
    hold(tmp_path, 17, 4, batches=[(1, 1), (3, 2), (16, 2)], quantization=quantization)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_outputs_of_a_thousand_requests_do_not_depend_on_the_batch(checkpoint):
    hold(checkpoint, 1000, 16, batches=[(1, 1), (7, 2), (32, 1), (32, 2)])


@pytest.mark.costly
@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"linear_method": "onednn"}, "linear_method OneDNN"),
        ({"ops": "torch"}, "ops TorchOps"),
        ({"attention_backend": "torch"}, "batch_invariant is required"),
        ({"dtype": "float32"}, "dtype='float32'"),
    ],
)
def test_plugins_without_batch_invariance_are_rejected(checkpoint, part, named):
    with pytest.raises(DovetailError, match=named):
        start(checkpoint, **part)
    start(checkpoint, batch_invariant=False, **part)
