"""Triton's ops without a GPU: in the interpreter, compiled for GPUs, and rejected with a reason."""

import re
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dovetail_devkit.ops.drawing_law import DrawParams, probabilities
from dovetail_devkit.triton.compiled_kernels import check_kernel
from dovetail_devkit.triton.interpreted import run_interpreted
from dovetail_ops_triton import availability
from dovetail_ops_triton.ops import TritonOps

with suppress(ImportError):  # a kernel below reads this name
    import triton.language as tl

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
NUM_INTERPRETED, NUM_SAMPLED = 336, 63


@pytest.mark.costly(32)
@pytest.mark.partial
@needs_triton
def test_the_op_kernels_pass_their_tests_in_the_triton_interpreter():
    check_interpreted(NUM_SAMPLED)


@needs_triton
@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_op_kernels_pass_all_cases_in_the_triton_interpreter():
    check_interpreted(NUM_INTERPRETED, complete=True)


def check_interpreted(num_cases, **options):
    folder = Path(__file__).parent / "interpreted"
    counts = run_interpreted(folder, timeout_s=1180 if options else 240, **options)
    assert (counts.failed, counts.skipped) == (0, 0), counts.output
    assert counts.passed >= num_cases, counts.output


def cases():
    if find_spec("triton") is None:
        return []
    from dovetail_ops_triton.kernel_cases import kernel_cases

    return [
        pytest.param(case, target, id=f"{case.name}, {target}")
        for case in kernel_cases()
        for target in case.targets
    ]


@pytest.mark.costly
@pytest.mark.sampled(30)
@pytest.mark.parametrize(("case", "target"), cases())
def test_the_kernels_compile_for_gpus(case, target):
    check_kernel(case, target)


@pytest.mark.costly
@needs_triton
def test_the_limits_of_step_sizes_keep_nan_on_gpus(monkeypatch, tmp_path):
    """A minimum or maximum of a GPU returns the limit; the interpreter keeps NaN."""
    import triton
    from triton.backends.compiler import GPUTarget

    from dovetail_ops_triton.kernels.states.chunk_systems import step_sizes

    @triton.jit
    def limit(x_ptr, step_min, step_max):
        tl.store(x_ptr, step_sizes(tl.load(x_ptr), step_min, step_max))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"x_ptr": "*fp32", "step_min": "fp32", "step_max": "fp32"}
    source = triton.compiler.ASTSource(limit, types, constexprs={})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert "%step_min" in compiled.asm["ttir"]
    assert not re.findall(r"arith\.m\w+numf .*%step_m\w+", compiled.asm["ttir"])


def test_without_triton_the_reason_is_reported(monkeypatch):
    monkeypatch.setattr(availability, "find_spec", lambda name: None)
    probe = availability.probe()
    assert not probe.usable
    assert probe.reasons == (
        "Triton is not installed: install a torch build for accelerators, which includes it",
    )


@pytest.mark.costly
def test_the_ops_class_can_be_imported_without_triton():
    program = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "from dovetail_ops_triton.ops import TritonOps\n"
        "assert TritonOps.device_types == {'cuda', 'xpu'}, TritonOps.device_types\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env={})


def test_the_cpu_is_supported_only_in_the_interpreter():
    assert "cpu" not in TritonOps.device_types


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_no_triton_op_waits_or_allocates_more_than_its_result():
    from dovetail_devkit.ops.inputs import SHAPES, make_columns

    device = torch.device("cuda")
    ops = TritonOps()
    x = torch.ones(64, 1024, dtype=torch.bfloat16, device=device)
    weight = torch.ones(1024, dtype=torch.bfloat16, device=device)
    columns, _ = make_columns(SHAPES["two groups"], device)
    draws = gpu_columns(64, device)
    calls = {
        "rms_norm": lambda: ops.rms_norm(x, weight, 1e-6),
        "best_tokens": lambda: ops.best_tokens(x),
        "draw_tokens": lambda: ops.draw_tokens(x, draws),
        "prepare_inputs": lambda: ops.prepare_inputs(columns),
    }
    for what, call in calls.items():
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        created = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        assert created <= 1, f"{what} allocates {created} times"


def gpu_columns(num_rows, device, **settings):
    from dovetail.interfaces.ops import DrawColumns

    params = DrawParams(**settings)
    return DrawColumns(
        temperature_R=torch.full((num_rows,), params.temperature, device=device),
        top_k_R=torch.full((num_rows,), params.top_k or 1 << 30, device=device, dtype=torch.int32),
        top_p_R=torch.full((num_rows,), params.top_p, device=device),
        min_p_R=torch.full((num_rows,), params.min_p, device=device),
        seeds_R=torch.arange(num_rows, device=device),
        positions_R=torch.arange(num_rows, device=device) % 7,
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("settings", [{}, {"top_k": 9, "top_p": 0.8}, {"min_p": 0.1}], ids=str)
def test_the_frequencies_of_many_samples_follow_the_distribution(settings):
    from dovetail_devkit.ops.draw import chi_squared

    device, num_rows, vocab_size = torch.device("cuda"), 1 << 16, 100
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)) * 2
    rows = logits.to(device).expand(num_rows, -1).contiguous()
    sampled = TritonOps().draw_tokens(rows, gpu_columns(num_rows, device, **settings))
    counts = sampled.bincount(minlength=vocab_size).tolist()
    assert abs(chi_squared(counts, probabilities(logits.tolist(), DrawParams(**settings)))) < 4
