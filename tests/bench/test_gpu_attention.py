"""Parts of the GPU attention benchmark that can be tested without a GPU."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from dovetail_devkit.attention.batch import check_batch

PROGRAM = Path(__file__).resolve().parents[2] / "bench" / "gpu" / "attention.py"


@pytest.fixture(scope="module")
def program():
    spec = spec_from_file_location("gpu_attention_bench", PROGRAM)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.costly
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_attention_benchmark_reports_a_missing_gpu():
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True)
    assert done.returncode == 3
    assert "needs a GPU" in done.stdout


def test_the_batches_of_the_gpu_attention_benchmark_are_valid(program):
    for query_len in (1, 20):
        step = program.Step(label="", num_rows=3, context_len=37, query_len=query_len)
        batch, num_blocks = program.make_batch(step, torch.device("cpu"))
        check_batch(batch, program.BLOCK_SIZE)
        assert int(batch.block_table_RM.max()) < num_blocks


def test_bytes_and_operations_of_a_step_are_counted(program):
    step = program.Step(label="", num_rows=2, context_len=3, query_len=2, heads=(4, 2, 8))
    assert step.cache_bytes == 2 * 5 * (2 * 2 * 8) * 2
    pairs = (3 + 1) + (3 + 2)
    assert step.num_operations == 2 * pairs * 4 * 4 * 8


def test_the_caches_of_the_benchmark_have_the_size_that_it_reports(program):
    for dtype in ("bfloat16", "fp8_e4m3"):
        step = program.Step(label="", num_rows=4096, context_len=4095, cache_dtype=dtype)
        (cache,) = program.make_caches(step, 3, torch.device("cpu"))
        assert cache.numel() * cache.itemsize == 3 * step.spec.page_size_bytes
        assert cache.float().isfinite().all()
