"""Fixtures for model runners of a tiny model.

Some runners rebuild the attention metadata in each step, others advance it.
"""

from functools import partial

import pytest
import torch

from dovetail.interfaces import KVCacheConfig, KVCacheGroup
from dovetail_devkit.harnesses.runner_harness import (
    MAX_LEN,
    NUM_BLOCKS,
    SIZE,
    Backend,
    CountingBackend,
    Model,
    Steps,
    V,
)
from dovetail_torch.positions import PositionTables
from dovetail_torch.runner.device_parts import TORCH_PARTS
from dovetail_torch.runner.kv_cache import kv_cache_specs, make_attention
from dovetail_torch.runner.loaded_model import LoadedModel
from dovetail_torch.runner.model_runner import ModelRunner
from dovetail_torch.runner.step_limits import StepLimits


@pytest.fixture
def model():
    return Model()


def make_runner(
    model, backend, parts=TORCH_PARTS, num_blocks=NUM_BLOCKS, device="cpu", extensions=None
):
    """Return a runner of `model` with an allocated cache."""
    limits = StepLimits(
        max_num_seqs=3,
        max_num_batched_tokens=32,
        max_model_len=MAX_LEN,
        dtype=torch.float32,
        kv_cache_dtype="float32",
        device=torch.device(device),
    )
    loaded = LoadedModel(
        model=model,
        num_layers=1,
        vocab_size=V,
        limits=limits,
        tables=PositionTables(model),
        device_parts=parts,
    )
    layers = {"layer": model.attention}
    specs = kv_cache_specs(None, layers, block_size=SIZE, limits=limits)
    group = KVCacheGroup(layer_names=("layer",), spec=specs["layer"])
    config = KVCacheConfig(num_blocks=num_blocks, groups=(group,))
    zeros = partial(torch.zeros, dtype=torch.uint8, device=device)
    attention = make_attention(backend, layers, config, limits, options={}, zeros=zeros)
    return ModelRunner(loaded, attention, extensions or {})


@pytest.fixture(params=[Backend, CountingBackend])
def runner(model, request):
    return make_runner(model, request.param)


@pytest.fixture
def steps(runner):
    return Steps(runner)


@pytest.fixture
def runner_of():
    """Return a function that creates a runner from a model, a backend and device parts."""
    return make_runner
