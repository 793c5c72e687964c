"""Read the properties of a GPU and of its driver. Tests replace `DeviceFacts` to simulate them."""

from __future__ import annotations

from ctypes import CDLL, byref, c_int

import torch

from dovetail.interfaces.attention import AttentionRequirements

UNKNOWN = 0
"""The value of a compute capability or driver version that is not known."""

_PREFIX = "sm_"
_DRIVER_LIBRARY = "libcuda.so.1"


class DeviceFacts:
    """Properties of the GPUs of this process."""

    device_type = "cuda"

    def capability(self, device: torch.device) -> int:
        """Return the compute capability · 10 of `device`, or UNKNOWN if it is not a CUDA device."""
        if device.type != self.device_type:
            return UNKNOWN
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor

    def required_capability(self, requirements: AttentionRequirements) -> int:
        """Return the compute capability · 10 of the assumed or the current GPU, or UNKNOWN."""
        if requirements.architecture:
            return int(requirements.architecture.removeprefix(_PREFIX))
        if not torch.cuda.is_available():
            return UNKNOWN
        return self.capability(torch.device(self.device_type, torch.cuda.current_device()))

    def driver(self) -> int:
        """Return the CUDA version · 1000 of the NVIDIA driver, such as 13000, or UNKNOWN."""
        if not torch.cuda.is_available():
            return UNKNOWN
        version = c_int(UNKNOWN)
        try:
            failed = CDLL(_DRIVER_LIBRARY).cuDriverGetVersion(byref(version))
        except (OSError, AttributeError):
            return UNKNOWN
        return UNKNOWN if failed else version.value

    def is_rocm(self, architecture: str = "") -> bool:
        """Return whether torch is built for ROCm, or the assumed architecture is not NVIDIA's."""
        if architecture:
            return not architecture.startswith(_PREFIX)
        return torch.version.hip is not None
