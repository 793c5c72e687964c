"""The plugins of each device: platform, worker, attention backends to test, suites to run.

"fake" is the torch layer's fake device. With the fake device, every section runs the device code
path on any machine. This tests the check itself, not a device. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

_FAKE = "dovetail_torch.fake_device"
_ATTENTION = f"{_FAKE}.attention:GraphAttentionBackend"


@dataclass(frozen=True, kw_only=True)
class DeviceParts:
    """A torch device type and its plugins by reference.

    attention: the backend of engines. backends: attention backends to test. plugins:
    "kind:name" of the suites to run. max_graph_size: see the option of the engine.
    """

    device_type: str
    platform: str
    worker: str
    attention: str
    backends: tuple[str, ...]
    plugins: tuple[str, ...]
    max_graph_size: int = 512

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of an engine on this device."""
        return {
            "max_graph_size": self.max_graph_size,
            "platform": self.platform,
            "worker_cls": self.worker,
            "attention_backend": self.attention,
        }


def _accelerator(name: str) -> DeviceParts:
    kernels = ("attention:triton", "attention:torch", "ops:triton", "ops:torch")
    if name == "cuda":
        kernels = ("attention:flash_attn", "attention:flashinfer", "ops:flashinfer", *kernels)
    return DeviceParts(
        device_type="cuda" if name == "rocm" else name,
        platform=name,
        worker=name,
        attention="triton",
        backends=("torch", "triton"),
        plugins=(f"platform:{name}", f"worker:{name}", *kernels, "linear_method:torch"),
    )


PARTS: Mapping[str, DeviceParts] = MappingProxyType(
    {
        "cpu": DeviceParts(
            device_type="cpu",
            platform="cpu",
            worker="cpu",
            attention="auto",
            backends=("torch",),
            plugins=("platform:cpu", "ops:torch"),
        ),
        "cuda": _accelerator("cuda"),
        "rocm": _accelerator("rocm"),
        "xpu": _accelerator("xpu"),
        "fake": DeviceParts(
            device_type="privateuseone",
            platform=f"{_FAKE}.platform:FakeDevicePlatform",
            worker=f"{_FAKE}.worker:FakeDeviceWorker",
            attention=_ATTENTION,
            backends=(_ATTENTION,),
            plugins=(f"platform:{_FAKE}.platform:FakeDevicePlatform",),
            max_graph_size=4,
        ),
    }
)
"""Devices by command-line name: that of the platform, or of the fake device."""

STAND_INS = frozenset({"cpu", "fake"})
"""Names of entries that are not real devices; runs on them do not verify a device."""


def prepare_device(name: str) -> None:
    """Register the fake device with torch; do nothing for other devices."""
    if name != "fake":
        return
    from dovetail_torch.fake_device import DEVICE, install

    install()
    DEVICE.reset(total_bytes=1 << 30)
