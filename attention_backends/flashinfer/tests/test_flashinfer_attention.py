"""The `flashinfer` backend: its Python code with reference kernels, and rejections without it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from dovetail.errors import ConfigError
from dovetail.interfaces.attention import AttentionLayerContext, AttentionRequirements
from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail_attn_flashinfer import availability, backend, device_checks
from dovetail_attn_flashinfer.backend import FlashInferAttentionBackend
from dovetail_attn_flashinfer.device_facts import DeviceFacts, device_facts, select_kernels
from dovetail_attn_flashinfer.options import FlashInferAttentionOptions

CPU = torch.device("cpu")
PATCHED = Path(__file__).parent / "patched"
LEAST_CASES = 220
NOT_INSTALLED = "FlashInfer is not installed: pip install --no-deps flashinfer-python==0.7.2.post1"
needs_flashinfer = pytest.mark.skipif(find_spec("flashinfer") is None, reason=NOT_INSTALLED)


@pytest.mark.costly(32)
@pytest.mark.partial
@needs_flashinfer
@pytest.mark.timeout(400)
def test_flashinfer_passes_its_tests_with_reference_kernels(tmp_path):
    """Runs the contract suite, the signatures, and a per-commit sample of the error matrix."""
    check_patched(tmp_path, LEAST_CASES)


@needs_flashinfer
@pytest.mark.soak
@pytest.mark.timeout(2000)
def test_flashinfer_passes_all_cases_with_reference_kernels(tmp_path):
    check_patched(tmp_path, 8 * LEAST_CASES, "-m", "")


def check_patched(folder, num_cases, *options):
    """Run the tests in `patched` in a separate process, in which the kernels are replaced."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-o", "python_files=patched_*.py", *options, str(PATCHED)]
    paths = [str(PATCHED), os.environ.get("PYTHONPATH", "")]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "FLASHINFER_WORKSPACE_BASE": str(folder),  # FlashInfer writes a log when it is imported
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=1900 if options else 380,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (num_passed,) = re.findall(r"(\d+) passed", done.stdout.splitlines()[-1])
    assert int(num_passed) >= num_cases, done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout


def requirements(**changes):
    values = {
        "device_type": "cuda",
        "dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "head_size": 128,
        "num_heads": 8,
        "num_kv_heads": 2,
        "block_size": 16,
    }
    return AttentionRequirements(**(values | changes))


@pytest.fixture
def version_of(monkeypatch):
    """Simulate an installed version of FlashInfer, and a CUDA compiler."""

    def pretend(text):
        monkeypatch.setattr(availability, "version", lambda name: text)

    pretend("0.7.2.post1")
    monkeypatch.setattr(availability, "has_kernels", lambda: True)
    return pretend


@pytest.fixture
def gpu(monkeypatch, version_of):
    """Simulate a GPU with a given compute capability."""

    def pretend(capability):
        facts = DeviceFacts(capability=capability, num_processors=100)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(device_checks, "device_facts", lambda device: facts)

    return pretend


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_type": "cpu"}, "device cpu is not supported; supported: cuda"),
        ({"device_type": "xpu"}, "device xpu is not supported; supported: cuda"),
        (
            {"dtype": "float32"},
            "dtype float32 is not supported; supported: bfloat16, float16",
        ),
        (
            {"kv_cache_dtype": "int8"},
            "KV cache dtype int8 is not supported; supported: bfloat16, float16, fp8_e4m3, "
            "fp8_e5m2",
        ),
        ({"head_size": 512}, "head size 512 is not supported; supported: 64, 128, 256"),
        ({"head_size": 16}, "head size 16 is not supported; supported: 64, 128, 256"),
        ({"block_size": 8}, "block size 8 is not supported; supported: multiples of 16"),
        ({"features": frozenset({"cascade"})}, "cascade is required but not declared"),
        (
            {"features": frozenset({"batch_invariant"})},
            "batch_invariant is required but not declared",
        ),
    ],
)
def test_attention_requirements_that_are_not_declared_are_rejected(changes, reason):
    result = FlashInferAttentionBackend.capabilities.refusals(requirements(**changes))
    assert result == [reason]


@pytest.mark.parametrize(("head_size", "stored"), [(32, 64), (80, 128), (96, 128), (160, 256)])
def test_heads_of_unsupported_sizes_are_padded(head_size, stored):
    assert FlashInferAttentionBackend.capabilities.stored_head_size(head_size) == stored


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [("fp8_e4m3", "kv_cache_scales='layer'"), ("int8", "kv_cache_dtype='auto'")],
)
def test_caches_with_per_token_scales_are_rejected(gpu, dtype, advice):
    gpu(100)
    (reason,) = FlashInferAttentionBackend.refusals(requirements(kv_cache_dtype=dtype))
    assert f"KV caches of {dtype} have a scale for each token and head" in reason
    assert f"set {advice}, or choose attention_backend='triton'" in reason


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_caches_with_per_layer_scales_are_accepted(gpu, dtype):
    gpu(90)
    expected = requirements(kv_cache_dtype=dtype, features=frozenset({"kv_layer_scales"}))
    assert not FlashInferAttentionBackend.refusals(expected)
    assert not FlashInferAttentionBackend.capabilities.refusals(expected)


def test_a_16_bit_cache_of_a_different_dtype_is_rejected(gpu):
    gpu(90)
    (reason,) = FlashInferAttentionBackend.refusals(requirements(kv_cache_dtype="float16"))
    assert reason == (
        "a KV cache of float16 is not supported for dtype bfloat16; set kv_cache_dtype='auto'"
    )


@pytest.mark.parametrize(
    ("capability", "reasons"),
    [
        (
            75,
            [
                "the GPU has compute capability 7.5; the kernels need 8.0 (Ampere) or newer. "
                "Choose attention_backend='torch'"
            ],
        ),
        (80, []),
        (89, []),
        (90, []),
        (103, []),
        (120, []),
    ],
)
def test_old_gpus_are_rejected(gpu, capability, reasons):
    gpu(capability)
    assert FlashInferAttentionBackend.refusals(requirements()) == reasons


def test_rocm_builds_of_torch_are_rejected(gpu, monkeypatch):
    gpu(94)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    (reason,) = FlashInferAttentionBackend.refusals(requirements())
    assert "torch is built for ROCm" in reason and "attention_backend='torch'" in reason


def test_heads_that_do_not_divide_evenly_are_rejected(gpu):
    gpu(90)
    (reason,) = FlashInferAttentionBackend.refusals(requirements(num_kv_heads=3))
    assert reason == "8 query heads are not a multiple of 3 key-value heads"


def test_a_missing_compiler_is_reported(gpu, monkeypatch):
    gpu(90)
    monkeypatch.setattr(availability, "has_kernels", lambda: False)
    (reason,) = FlashInferAttentionBackend.refusals(requirements())
    assert "no CUDA compiler was found" in reason and "flashinfer-jit-cache" in reason


def test_kernels_are_compiled_or_installed(monkeypatch, tmp_path):
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(availability, "find_spec", lambda name: None)
    monkeypatch.setattr(availability, "which", lambda name: None)
    monkeypatch.setattr(availability, "DEFAULT_CUDA", tmp_path / "missing")
    assert not availability.has_kernels()
    monkeypatch.setattr(availability, "DEFAULT_CUDA", tmp_path)
    assert availability.has_kernels()
    monkeypatch.setattr(availability, "DEFAULT_CUDA", tmp_path / "missing")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    assert availability.has_kernels()
    monkeypatch.delenv("CUDA_PATH")
    monkeypatch.setattr(availability, "find_spec", lambda name: name)
    assert availability.has_kernels()


@pytest.mark.parametrize("version", ["0.6.13", "0.8.0", "1.7.0", "0.70.1"])
def test_unsupported_versions_are_rejected_without_an_import(version_of, version):
    version_of(version)
    (reason,) = FlashInferAttentionBackend.refusals(requirements(device_type="cpu"))
    assert reason == (
        f"flashinfer-python {version} is installed, but the plugin supports 0.7.x only: run "
        "pip install 'dovetail-attn-flashinfer[flashinfer]'"
    )


@pytest.mark.parametrize("version", ["0.7.0", "0.7.2.post1", "0.7.10rc1"])
def test_versions_of_the_supported_series_are_accepted(version_of, version):
    version_of(version)
    assert availability.probe().usable
    assert not FlashInferAttentionBackend.refusals(requirements(device_type="cpu"))


def test_a_missing_package_is_reported(version_of, monkeypatch):
    def missing(name):
        raise availability.PackageNotFoundError(name)

    monkeypatch.setattr(availability, "version", missing)
    (reason,) = FlashInferAttentionBackend.refusals(requirements(device_type="cpu"))
    assert reason.startswith("flashinfer-python is not installed: run pip install")


@pytest.mark.costly
def test_rejections_do_not_import_flashinfer():
    program = (
        "import sys; from dovetail_attn_flashinfer import backend, options, availability;"
        "availability.probe(); assert 'flashinfer' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_cache_has_the_same_shape_as_in_the_triton_backend():
    spec = FullAttentionSpec(block_size=32, num_kv_heads=3, head_size=128, dtype="bfloat16")
    assert FlashInferAttentionBackend.kv_cache_shape(7, spec) == (7, 2, 3, 32, 128)


@pytest.mark.parametrize(
    ("dtype", "scale_bytes"), [("fp8_e4m3", 4), ("int8", 0), ("float32", 0), ("bfloat16", 4)]
)
def test_unsupported_caches_raise_an_error(dtype, scale_bytes):
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=dtype, scale_bytes=scale_bytes
    )
    with pytest.raises(ConfigError, match=f"cannot use a KV cache of {dtype} with scale_bytes="):
        backend.check_cache(spec)


def test_devices_of_other_types_raise_an_error():
    with pytest.raises(ConfigError, match="it supports CUDA devices only"):
        device_facts(CPU)


def test_layers_whose_heads_do_not_divide_evenly_raise_an_error():
    context = AttentionLayerContext(
        layer_name="layers.3.attn",
        num_heads=8,
        num_kv_heads=3,
        head_size=64,
        scale=0.125,
        dtype=torch.bfloat16,
        device=CPU,
    )
    with pytest.raises(ConfigError, match="8 query heads and 3 key-value heads"):
        backend.check_heads(context)


def test_unknown_options_are_rejected():
    assert FlashInferAttentionOptions().workspace_mib == 128
    for invalid in ({"kernels": "cudnn"}, {"workspace_mib": 1}, {"workspace": 3}):
        with pytest.raises(ValidationError):
            FlashInferAttentionOptions(**invalid)


@pytest.mark.parametrize(
    ("capability", "requested", "block_size", "selected"),
    [
        (80, "auto", 16, ("fa2", False)),
        (89, "auto", 16, ("fa2", False)),
        (90, "auto", 16, ("fa3", False)),
        (90, "fa2", 16, ("fa2", False)),
        (90, "fa3", 48, ("fa3", False)),
        (100, "auto", 16, ("fa2", True)),
        (103, "auto", 64, ("fa2", True)),
        (103, "auto", 48, ("fa2", False)),
        (100, "trtllm-gen", 32, ("fa2", True)),
        (100, "fa2", 32, ("fa2", False)),
        (110, "auto", 16, ("fa2", False)),
        (120, "auto", 16, ("fa2", False)),
    ],
)
def test_the_kernels_depend_on_the_device(capability, requested, block_size, selected):
    facts = DeviceFacts(capability=capability, num_processors=100)
    kernels = select_kernels(facts, requested, block_size)
    assert (kernels.prefill, kernels.block_tables) == selected


@pytest.mark.parametrize(
    ("capability", "requested", "block_size", "message"),
    [
        (100, "fa3", 16, r"kernels='fa3' needs compute capability 9\.0, but .* 10\.0"),
        (90, "trtllm-gen", 16, r"needs compute capability 10\.0 or 10\.3, but .* 9\.0"),
        (100, "trtllm-gen", 48, "does not support blocks of 48 tokens"),
    ],
)
def test_kernels_that_the_device_does_not_have_raise_an_error(
    capability, requested, block_size, message
):
    facts = DeviceFacts(capability=capability, num_processors=100)
    with pytest.raises(ConfigError, match=message):
        select_kernels(facts, requested, block_size)
