"""A seed gives the same tokens in every batch, or the engine logs a warning at startup."""

import json

import pytest
import torch
from safetensors.torch import save_file

from dovetail import LLM, SamplingParams
from dovetail_cpu.native_library import probe_fast
from dovetail_devkit.tiny_model import TINY_LLAMA, llama_shapes

pytest.importorskip("dovetail_attn_cpu")
pytest.importorskip("dovetail_models")
pytestmark = pytest.mark.skipif(
    not probe_fast().usable, reason="native kernels are not usable here"
)

V = 997
WARNING = "A seeded request may get different tokens"


@pytest.fixture(scope="module")
def make_checkpoint(tmp_path_factory):
    """Return a function that writes a random Llama with heads of a given size."""

    def make(head_size, dtype="bfloat16"):
        shape = TINY_LLAMA | {
            "hidden_size": 64,
            "intermediate_size": 96,
            "head_dim": head_size,
            "vocab_size": V,
            "torch_dtype": dtype,
        }
        path = tmp_path_factory.mktemp(f"heads-of-{head_size}")
        generator = torch.Generator().manual_seed(head_size)
        weights = {
            name: (torch.randn(size, generator=generator) * 0.1 + (len(size) == 1)).bfloat16()
            for name, size in llama_shapes(shape).items()
        }
        (path / "config.json").write_text(json.dumps(shape))
        save_file(weights, path / "model.safetensors")
        return path

    return make


def start(path, **options):
    return LLM(
        str(path),
        skip_tokenizer_init=True,
        max_model_len=128,
        num_gpu_blocks_override=300,
        block_size=16,
        max_num_batched_tokens=96,
        enable_prefix_caching=False,
        num_threads=1,
        use_tqdm_on_load=False,
        **options,
    )


def seeded(index):
    return SamplingParams(temperature=1.0, seed=index, max_tokens=20, ignore_eos=True)


def answers(llm):
    """Return the tokens of eight seeded requests, run in one batch and one by one."""
    prompts = [[(7 * i + 3 * j) % V for j in range(5 + 9 * i)] for i in range(8)]
    params = [seeded(i) for i in range(8)]
    together = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
    alone = [
        llm.generate(prompt, item)[0].outputs[0].token_ids
        for prompt, item in zip(prompts, params, strict=True)
    ]
    return together, alone


@pytest.mark.sampled(6)
@pytest.mark.parametrize("head_size", [10, 20, 36, 72, 64])
def test_seeds_are_reproducible_with_any_head_size(make_checkpoint, head_size, caplog):
    with start(make_checkpoint(head_size), batch_invariant=True) as llm:
        together, alone = answers(llm)
    assert together == alone
    assert WARNING not in caplog.text


def test_padded_heads_give_the_same_tokens_as_torch(make_checkpoint):
    path = make_checkpoint(20)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    prompts = [[(11 * i + 5 * j) % V for j in range(3 + 17 * i)] for i in range(4)]
    tokens = {}
    for backend in ("cpu", "torch"):
        with start(path, attention_backend=backend) as llm:
            outputs = llm.generate(prompts, params)
        tokens[backend] = [
            {token: item.logprob for token, item in out.outputs[0].logprobs[0].items()}
            for out in outputs
        ]
    for native, reference in zip(tokens["cpu"], tokens["torch"], strict=True):
        shared = native.keys() & reference.keys()
        assert len(shared) >= 4
        assert max(abs(native[token] - reference[token]) for token in shared) < 0.05


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"attention_backend": "torch"}, ["attention backend torch", "bfloat16"]),
        ({"linear_method": "torch"}, ["linear method Torch", "bfloat16"]),
        ({"dtype": "float16"}, ["attention backend torch", "linear method", "float16"]),
        ({}, []),
    ],
    ids=["attention", "linear", "float16", "native"],
)
def test_the_startup_log_names_plugins_without_batch_invariance(
    make_checkpoint, options, parts, caplog
):
    start(make_checkpoint(32), **options).shutdown()
    warnings = [line for line in caplog.messages if WARNING in line]
    assert len(warnings) == bool(parts)
    assert all(part in warning for warning in warnings for part in parts)
