"""The backend on the fake device, whose captures forbid waits, host memory and new addresses.

torch's allocator of page-locked memory keeps freed memory, so it rarely waits for the device. Here,
one large buffer simulates the allocator; its parts are never reused.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import reference_kernels
import torch
from cpu_backends import LEAST_MEMORY
from reference_kernels import decode

from dovetail_attn_flashinfer.builder import FlashInferMetadataBuilder
from dovetail_attn_flashinfer.device_facts import DeviceFacts
from dovetail_torch.fake_device import DEVICE, NAME, install
from dovetail_torch.fake_device.platform import FakeDevicePlatform
from dovetail_torch.fake_device.worker import FakeDeviceWorker

PARTS = {"platform": FakeDevicePlatform, "worker_cls": FakeDeviceWorker}
ALIGNMENT = 64
PINNED_BYTES = 256 << 20


class PinnedMemory:
    """Page-locked memory of the fake device."""

    def __init__(self) -> None:
        self._memory = DEVICE.flights.pinned_zeros(PINNED_BYTES)
        self._used = 0

    def empty(self, *args, pin_memory=False, **kwargs) -> torch.Tensor:
        """Stand in for `torch.empty`, for page-locked memory of the fake device."""
        created = reference_kernels._empty(*args, **kwargs)
        if not pin_memory or created.device.type != "cpu":
            return created
        start = self._used
        self._used = -(-(start + created.nbytes) // ALIGNMENT) * ALIGNMENT
        assert self._used <= PINNED_BYTES, "increase PINNED_BYTES"
        return self._memory[start : start + created.nbytes].view(created.dtype).view(created.shape)


@contextmanager
def fake_device():
    """Make the fake device the accelerator of FlashInfer's Python code."""
    install()
    DEVICE.reset(lag=20, seed=1, total_bytes=1 << 30)
    memory, get_range = PinnedMemory(), decode._get_range_buf

    def pinned_range(size, device):
        # FlashInfer copies these few bytes from pageable memory, which a driver buffers.
        numbers = get_range(size, device)
        return memory.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers)

    torch.empty, decode._get_range_buf = memory.empty, pinned_range
    try:
        yield
        DEVICE.check()
    finally:
        torch.empty, decode._get_range_buf = reference_kernels.pageable_empty, get_range
        DEVICE.reset()


def on_fake_device(backend):
    """Return the backend for the fake device instead of the CPU."""

    class OnFakeDevice(backend):
        capabilities = replace(backend.capabilities, device_types=frozenset({NAME}))

        @classmethod
        def create_builder(cls, context):
            facts = DeviceFacts(
                capability=cls.capability, num_processors=reference_kernels.NUM_PROCESSORS
            )
            return FlashInferMetadataBuilder(replace(context, options=LEAST_MEMORY), facts)

    return OnFakeDevice
