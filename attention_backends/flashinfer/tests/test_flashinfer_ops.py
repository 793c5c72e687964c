"""The op provider `flashinfer` without the package: its declarations and its rejections.

The patched directory tests its results, with reference kernels.
"""

import subprocess
import sys

import pytest
import torch

from dovetail.errors import ConfigError, UnfitPluginError
from dovetail.interfaces.ops import overridden_operations
from dovetail.plugins import PluginRegistry
from dovetail.plugins.selection import choose
from dovetail_attn_flashinfer import availability, device_checks
from dovetail_attn_flashinfer.device_facts import DeviceFacts
from dovetail_attn_flashinfer.ops import FlashInferOps, can_rotate, vector_bytes
from dovetail_cuda.platform import CUDAPlatform


@pytest.fixture
def installed(monkeypatch):
    """Simulate a supported version of FlashInfer, and a CUDA compiler."""
    monkeypatch.setattr(availability, "version", lambda name: "0.7.2.post1")
    monkeypatch.setattr(availability, "has_kernels", lambda: True)


@pytest.fixture
def gpu(monkeypatch, installed):
    """Simulate a GPU with a given compute capability."""

    def pretend(capability):
        facts = DeviceFacts(capability=capability, num_processors=100)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(device_checks, "device_facts", lambda device: facts)

    return pretend


def chosen(dtype, platform="sm_90"):
    registry = PluginRegistry()
    platform = CUDAPlatform.assume(platform)
    registry.bind_platform(platform)
    return choose(registry, platform, "ops", "flashinfer", dtype=dtype)


def test_the_provider_is_selected_by_its_name(installed):
    assert chosen("bfloat16") is FlashInferOps


def test_models_in_float32_are_rejected_at_startup(installed):
    with pytest.raises(UnfitPluginError, match=r"supports bfloat16, float16, but .* is float32"):
        chosen("float32")


def test_a_missing_compiler_is_reported(installed, monkeypatch):
    monkeypatch.setattr(availability, "has_kernels", lambda: False)
    result = availability.probe_ops()
    assert not result.usable
    assert "no CUDA compiler was found" in result.reasons[0]
    with pytest.raises(UnfitPluginError, match="no CUDA compiler was found"):
        chosen("bfloat16")


@pytest.mark.parametrize("version", ["0.6.13", "0.8.0"])
def test_the_error_for_an_unsupported_version_names_the_supported_one(
    installed, monkeypatch, version
):
    monkeypatch.setattr(availability, "version", lambda name: version)
    (reason,) = availability.probe_ops().reasons
    assert f"{version} is installed, but the plugin supports 0.7.x only" in reason


def test_an_old_gpu_is_rejected_when_the_ops_are_created(gpu):
    gpu(75)
    with pytest.raises(ConfigError, match=r"capability 7\.5; the kernels need 8\.0 .*ops='triton'"):
        FlashInferOps()
    gpu(80)
    FlashInferOps.check_device()


def test_a_rocm_build_is_rejected_when_the_ops_are_created(gpu, monkeypatch):
    gpu(90)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ConfigError, match=r"torch is built for ROCm.*ops='triton' or ops='torch'"):
        FlashInferOps()


@pytest.mark.costly
def test_the_class_can_be_imported_without_flashinfer():
    program = (
        "import sys; sys.modules['flashinfer'] = None\n"
        "from dovetail_attn_flashinfer.ops import FlashInferOps"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_torch_computes_sampling():
    """FlashInfer's random numbers depend on the position of a request in the batch."""
    assert overridden_operations(FlashInferOps) == {
        "rms_norm",
        "offset_rms_norm",
        "add_rms_norm",
        "add_offset_rms_norm",
        "silu_and_mul",
        "rotary_embedding",
    }


@pytest.mark.parametrize(("size", "num_bytes"), [(64, 16), (4, 8), (33, 2), (36, 8), (2, 4)])
def test_the_alignment_of_rows_is_derived_from_their_size(size, num_bytes):
    assert vector_bytes(size) == num_bytes


def test_halves_of_rotated_features_consist_of_complete_vectors():
    sizes = [(64, 64), (64, 16), (64, 8), (512, 32), (512, 16), (160, 160), (80, 80), (32, 64)]
    assert [can_rotate(*item) for item in sizes] == [
        True,
        True,
        False,
        True,
        False,
        True,
        False,
        False,
    ]
