"""What has to do with a device: its platform and worker, attention backends to try, suites to run.

"fake" is the torch layer's stand-in for a device: with it every section goes the way of a device on
any machine, which tries the check out and proves nothing. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_FAKE = "dovetail_torch.fake_device"
_NO_WAIT = f"{_FAKE}.attention:NoWaitAttentionBackend"


@dataclass(frozen=True, kw_only=True)
class DeviceParts:
    """A device's type, as torch is told it, and its plugins by reference.

    attention: the backend that serves. backends: of attention, to be held against references.
    plugins: "kind:name" whose suites are run.
    """

    device_type: str
    platform: str
    worker: str
    attention: str
    backends: tuple[str, ...]
    plugins: tuple[str, ...]

    @property
    def options(self) -> dict[str, str]:
        """The options of an engine on this device."""
        return {
            "platform": self.platform,
            "worker_cls": self.worker,
            "attention_backend": self.attention,
        }


def _accelerator(name: str) -> DeviceParts:
    kernels = ("attention:triton", "attention:torch", "ops:triton", "ops:torch")
    return DeviceParts(
        device_type=name,
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
        "xpu": _accelerator("xpu"),
        "fake": DeviceParts(
            device_type="privateuseone",
            platform=f"{_FAKE}.platform:FakeDevicePlatform",
            worker=f"{_FAKE}.worker:FakeDeviceWorker",
            attention=_NO_WAIT,
            backends=(_NO_WAIT,),
            plugins=(f"platform:{_FAKE}.platform:FakeDevicePlatform",),
        ),
    }
)
"""By the name that the command line has for a device: its type, but for the stand-in."""

STAND_INS = frozenset({"cpu", "fake"})
"""What is not a device: a run on one proves nothing about devices."""


def prepare_device(name: str) -> None:
    """Make a stand-in known to torch; a device that is one is known already."""
    if name != "fake":
        return
    from dovetail_torch.fake_device import DEVICE, install

    install()
    DEVICE.reset(total_bytes=1 << 30)
