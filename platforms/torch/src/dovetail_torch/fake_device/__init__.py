"""A device that is none: host tensors behind a wall, with a watch on waits and on memory in flight.

For tests of whatever runs ahead of a device, on machines that have none. Numbers are the host's, so
results can be compared bit by bit. What it finds is in `DEVICE`; `install` makes it known to torch.
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
