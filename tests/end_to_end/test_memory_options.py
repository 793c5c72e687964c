"""Options for memory and precision take effect from the command line."""

from __future__ import annotations

import pytest
import torch

from dovetail.cli import main
from dovetail_torch.fake_device import DEVICE, install

FAKE_DEVICE = (
    "--platform=dovetail_torch.fake_device.platform:FakeDevicePlatform",
    "--worker-cls=dovetail_torch.fake_device.worker:FakeDeviceWorker",
    "--attention-backend=dovetail_torch.fake_device.attention:NoWaitAttentionBackend",
)


def generate(model_dir, *options, platform=("--platform=cpu",)):
    arguments = (*platform, "--kv-cache-memory-bytes=1000000", *options)
    return main(["generate", "--model", str(model_dir), *arguments, "--max-tokens", "2", "1 2"])


@pytest.mark.costly
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--enable-sleep-mode"], "enable_sleep_mode"),
        (["--cpu-offload-gb=0.001"], "cpu_offload_gb"),
        (["--kv-cache-dtype=fp8_e4m3"], "fp8_e4m3"),
        (["--kv-cache-dtype=int8", "--kv-cache-scales=layer"], "kv_cache_scales"),
        (["--matmul-precision=low"], "matmul_precision"),
    ],
)
def test_memory_options_that_the_cpu_does_not_support_are_rejected(
    model_dir, options, named, capsys
):
    assert generate(model_dir, *options) == 2
    assert named in capsys.readouterr().err


def test_the_command_line_sets_the_precision_of_matrix_products(model_dir):
    before = torch.get_float32_matmul_precision()
    try:
        assert generate(model_dir, "--matmul-precision=medium") == 0
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_sleep_mode_and_weight_offload_reach_the_worker_of_a_device(model_dir, capsys):
    install()
    DEVICE.reset(total_bytes=1 << 30)
    both = ("--enable-sleep-mode", "--cpu-offload-gb=0.00001")
    assert generate(model_dir, *both, platform=FAKE_DEVICE) == 2
    message = capsys.readouterr().err
    assert "enable_sleep_mode" in message and "cpu_offload_gb" in message
