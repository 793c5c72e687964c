"""A fake device: host tensors whose accesses are checked for hidden synchronizations and races.

For tests of code that runs ahead of a device, on machines without a device. Results are bitwise
equal to those on the host. `DEVICE` has the findings; `install` registers the device with torch.
"""

from dovetail_torch.fake_device.device import DEVICE, FakeDevice
from dovetail_torch.fake_device.module import FakeDeviceModule, install
from dovetail_torch.fake_device.tensor import NAME, FakeDeviceTensor
from dovetail_torch.fake_device.watch import FlightError, HiddenWaitError

__all__ = [
    "DEVICE",
    "NAME",
    "FakeDevice",
    "FakeDeviceModule",
    "FakeDeviceTensor",
    "FlightError",
    "HiddenWaitError",
    "install",
]
