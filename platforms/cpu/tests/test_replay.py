"""Replays give bitwise the same results as eager steps.

A step is not replayed if an operation would be missing.
Two models are first-party. One third-party model uses only our layers, another also torch
operations.
"""

import json
import logging
from pathlib import Path

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail_cpu.native_library import probe_fast

pytest.importorskip("dovetail_attn_cpu")
pytest.importorskip("dovetail_models")
pytestmark = pytest.mark.skipif(
    not probe_fast().usable, reason="native kernels are not usable here"
)

if probe_fast().usable:
    from dovetail_cpu.activation_arena import ActivationArena, ArenaLease
    from dovetail_cpu.replay import MAX_TOKENS, ReplayProvider
    from dovetail_torch.graph_provider import BatchDescriptor

V = 97
OURS = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


def hf_overrides_for(path):
    """Return the `hf_overrides` for a class of out_of_tree_decoder.py, or None otherwise."""
    (name,) = json.loads((path / "config.json").read_text())["architectures"]
    if name in OURS:
        return None
    return {"architectures": [f"{Path(__file__).with_name('out_of_tree_decoder.py')}:{name}"]}


def answers(path, num_threads=2, **options):
    """Run requests of different lengths in a batch.

    Return tokens, log-probabilities, step counts.
    """
    llm = LLM(
        str(path),
        hf_overrides=hf_overrides_for(path),
        skip_tokenizer_init=True,
        trust_local_code=True,
        max_model_len=64,
        max_num_batched_tokens=24,
        max_num_seqs=8,
        num_threads=num_threads,
        num_gpu_blocks_override=64,
        block_size=16,
        **options,
    )
    prompts = [[3 + i, 50 - i, 7 * i % V, *range(i)] for i in range(7)]
    params = [
        SamplingParams(temperature=i % 2, max_tokens=6 + i, ignore_eos=True, logprobs=2, seed=i)
        for i in range(7)
    ]
    outputs = []
    for _ in range(4):
        outputs += llm.generate(prompts, params, use_tqdm=False)
    counts = llm.llm_engine.client.core.executor._worker._runner.graph_counts
    return [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs], counts


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize("architecture", [*OURS, "CustomNormsLayer"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_replayed_steps_are_bitwise_equal_to_eager_steps(
    architecture, num_threads, write_bf16, caplog
):
    path = write_bf16(architecture)
    replayed, counts = answers(path, num_threads)
    eager, none = answers(path, num_threads, enforce_eager=True)
    assert replayed == eager
    assert counts.replayed > 10, counts
    assert none.captured == none.replayed == 0
    assert "runs eagerly" not in caplog.text


@pytest.mark.costly
@pytest.mark.parametrize(
    ("architecture", "quantization"),
    [("LlamaForCausalLM", "int8"), ("LlamaForCausalLM", "int4"), ("Qwen3MoeForCausalLM", "int4")],
)
def test_quantized_models_are_replayed_too(architecture, quantization, write_bf16):
    path = write_bf16(architecture)
    replayed, counts = answers(path, quantization=quantization)
    assert replayed == answers(path, quantization=quantization, enforce_eager=True)[0]
    assert counts.replayed > 10


@pytest.mark.costly
@pytest.mark.parametrize(
    ("architecture", "reason"),
    [("MixedOpsLayer", "aten::mul.Tensor"), ("HiddenCopyLayer", "different results")],
)
def test_a_model_that_cannot_be_recorded_runs_eagerly_and_the_log_says_why(
    architecture, reason, write_bf16, caplog
):
    path = write_bf16(architecture)
    actual, counts = answers(path)
    assert counts.replayed == 0
    announced = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert len(announced) == 1
    assert reason in announced[0]
    assert architecture in announced[0]
    assert actual == answers(path, enforce_eager=True)[0]


def test_arena_memory_is_reused_when_its_tensors_are_freed():
    lease = ArenaLease(ActivationArena(1 << 20))
    first = lease.take(100)
    second = lease.take(100)
    view, address = first[10:20], first.data_ptr()
    assert second.data_ptr() != address
    del first
    assert lease.take(100).data_ptr() not in (address, second.data_ptr())
    del view
    assert lease.take(100).data_ptr() == address
    assert lease.take(2 << 20) is None
    again = ArenaLease(ActivationArena(1 << 20))
    assert again.take(1).data_ptr() % 64 == 0


def test_only_small_steps_are_recorded():
    provider = ReplayProvider()

    def key(num_tokens, num_requests, uniform):
        return provider.key(
            BatchDescriptor(num_tokens=num_tokens, num_requests=num_requests, uniform=uniform)
        )

    assert key(MAX_TOKENS, 3, uniform=False) == key(MAX_TOKENS, 4, uniform=False) is not None
    assert key(4, 4, uniform=True) != key(4, 4, uniform=False)
    assert key(MAX_TOKENS + 1, 3, uniform=False) is None


def test_a_step_that_copies_tensors_is_not_recorded_and_a_step_with_views_is():
    provider = ReplayProvider()
    x = torch.zeros(4, 6)

    def failure_reason(make):
        return provider.capture(lambda: (make(),)).failure_reason

    for make in (lambda: x.view(6, 4), lambda: x[1:].flatten(), lambda: x.new_empty(3).detach()):
        assert failure_reason(make) == ""
    for make in (lambda: x.t().flatten(), lambda: x.t().contiguous(), lambda: x.new_zeros(2)):
        assert "aten::" in failure_reason(make)
    full = provider.capture(lambda: (torch.empty(1 << 29, dtype=torch.uint8),))
    assert full.graph is None
    assert not full.permanent
