"""An engine with this backend in float16 generates the tokens of the `torch` backend in float32.

test_flash_attn_attention.py starts these tests in a separate process.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cpu_backends import BACKENDS, BLOCK_SIZE, IS_FA3, OnCpu, SimulatedGpu
from reference_kernels import calls

from dovetail import LLM, SamplingParams
from dovetail_devkit.contexts import SMALL_ENGINE
from dovetail_devkit.tiny_model import write_tiny_llama
from dovetail_torch.fake_device import DEVICE, NAME, install
from dovetail_torch.fake_device.platform import FakeDevicePlatform
from dovetail_torch.fake_device.worker import FakeDeviceWorker

PROMPTS = [[1, 2, 3, 5, 7], list(range(3, 40)), [9] * 20, [4]]
NUM_TOKENS = 20
HEAD_SIZE = 24
"""Smaller than all head sizes of the backend, so that heads are padded."""


def generate(model, backend, dtype, **options):
    """Return the tokens of all prompts, and the counts of steps with and without a graph."""
    options |= {"dtype": dtype, "block_size": BLOCK_SIZE, "skip_tokenizer_init": True}
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
    return generate(model, "torch", "float32")[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_generates_the_same_tokens_as_with_the_torch_backend(model, expected, backend):
    """Prompts are cut into chunks, and steps contain chunks and decodes."""
    assert generate(model, backend, "float16")[0] == expected


@pytest.fixture
def fake_device():
    """A device whose captures forbid waits, host memory and new addresses."""
    install()
    DEVICE.reset(lag=20, seed=1)
    yield
    DEVICE.reset()


class FakeGpu(SimulatedGpu):
    """The fake device with the compute capability of a GPU."""

    device_type = NAME


def generate_on_fake_device(model, backend, dtype, **options):
    class OnFakeDevice(backend):
        devices = FakeGpu(backend.devices.capability(None))
        capabilities = replace(backend.capabilities, device_types=frozenset({NAME}))

    options |= {"platform": FakeDevicePlatform, "worker_cls": FakeDeviceWorker}
    return generate(model, OnFakeDevice, dtype, num_gpu_blocks_override=20, **options)


@pytest.mark.parametrize("mode", ["full_and_piecewise", "piecewise", "none"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_graphs_generate_the_same_tokens_as_eager_steps(
    model, expected, fake_device, backend, mode
):
    tokens, counts = generate_on_fake_device(model, backend, "float16", graph_mode=mode)
    assert tokens == expected
    assert (counts.replayed > 10) == (mode != "none")
    assert (counts.eager == 0) == (mode != "none")
    DEVICE.check()


@pytest.mark.skipif(not IS_FA3, reason="the provider has no fp8")
def test_graphs_with_an_fp8_cache_generate_the_same_tokens_as_eager_steps(model, fake_device):
    options = {"kv_cache_dtype": "fp8_e4m3", "kv_cache_scales": "layer"}
    modes = ("none", "full_and_piecewise")
    eager, replayed = (
        generate_on_fake_device(model, OnCpu, "bfloat16", graph_mode=mode, **options)
        for mode in modes
    )
    assert replayed[0] == eager[0]
    assert (eager[1].replayed, replayed[1].eager) == (0, 0)
    kernel_inputs = {keywords["q"].dtype for _, keywords in calls if "q" in keywords}
    assert kernel_inputs == {torch.float8_e4m3fn}
    DEVICE.check()
