"""Copies host columns to an asynchronous device: packed, and sent in one copy.

Sent data stays in pinned memory until the device has copied it. The memory is a ring of slots. Each
slot is filled with several packets, and reused only when all copies from it are complete. This
module does not depend on the meaning of the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dovetail_torch.device_runtime import AsyncDevice, DeviceEvent

Array = np.ndarray

NUM_SLOTS = 4
SLOT_BYTES = 1 << 19
_ALIGNMENT = 16
_DTYPES = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


@dataclass(slots=True)
class _Slot:
    """pinned: the slot's memory. on_host: that memory as an array. past: event after its copies."""

    pinned: torch.Tensor
    on_host: Array
    past: DeviceEvent | None = None


class Staging:
    """Sends arrays to one asynchronous device. Called from one thread."""

    def __init__(
        self,
        device: torch.device,
        asynchronous: AsyncDevice,
        *,
        num_slots: int = NUM_SLOTS,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """slot_bytes: size of each slot. A larger packet is sent in several parts."""
        self._device = device
        self.asynchronous = asynchronous
        self._slot_bytes = slot_bytes
        self._slots = [_make_slot(asynchronous, slot_bytes) for _ in range(num_slots)]
        self._current = 0
        self._used = 0

    def send(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Return the arrays as tensors on the device, of the same shapes and dtypes.

        The arrays may change afterwards. The tensors do not share memory with other tensors. Waits
        only if all slots are in use.
        """
        flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
        offsets, num_bytes = [], 0
        for numbers in flat:
            offsets.append(num_bytes)
            num_bytes += -(-len(numbers) // _ALIGNMENT) * _ALIGNMENT
        packet = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        if num_bytes <= self._slot_bytes:
            room = self._take(num_bytes)
            for numbers, offset in zip(flat, offsets, strict=True):
                room.on_host[offset : offset + len(numbers)] = numbers
            packet.copy_(room.pinned, non_blocking=True)
        else:
            self._send_pieces(flat, offsets, packet)
        return [
            packet[offset : offset + len(numbers)].view(_DTYPES[array.dtype]).view(array.shape)
            for array, numbers, offset in zip(arrays, flat, offsets, strict=True)
        ]

    def upload(self, numbers: Array) -> torch.Tensor:
        """Send one array."""
        return self.send((numbers,))[0]

    def _send_pieces(
        self, flat: Sequence[Array], offsets: Sequence[int], packet: torch.Tensor
    ) -> None:
        """Send arrays that are larger than a slot, part by part."""
        whole = np.empty(len(packet), np.uint8)
        for numbers, offset in zip(flat, offsets, strict=True):
            whole[offset : offset + len(numbers)] = numbers
        for start in range(0, len(whole), self._slot_bytes):
            piece = whole[start : start + self._slot_bytes]
            room = self._take(len(piece))
            room.on_host[:] = piece
            packet[start : start + len(piece)].copy_(room.pinned, non_blocking=True)

    def _take(self, num_bytes: int) -> _Slot:
        """Return free memory of this size in the current slot, or in the next one."""
        if self._used + num_bytes > self._slot_bytes:
            self._slots[self._current].past = self.asynchronous.record()
            self._current = (self._current + 1) % len(self._slots)
            self._used = 0
            past = self._slots[self._current].past
            if past is not None:
                past.synchronize()
        slot, start = self._slots[self._current], self._used
        self._used = end = start + num_bytes
        return _Slot(pinned=slot.pinned[start:end], on_host=slot.on_host[start:end])


def _make_slot(asynchronous: AsyncDevice, num_bytes: int) -> _Slot:
    pinned = asynchronous.pinned_zeros(num_bytes)
    return _Slot(pinned=pinned, on_host=pinned.numpy())
