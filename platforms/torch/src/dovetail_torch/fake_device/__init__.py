"""A fake device: host tensors with access checks for hidden synchronizations and memory in use.

For tests of code that runs ahead of a device, on machines without one. Results have the same bits
as on the host. `DEVICE` has the findings; `install` registers the device with torch.
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
