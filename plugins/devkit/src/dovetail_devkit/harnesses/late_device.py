"""A fake asynchronous device with CPU tensors. A copy is executed only when the host waits for it.
Until then, the host reads `POISON`, and the source and the target of the copy must not change.
"""

from dataclasses import replace

import torch

from dovetail_torch.runner.device_parts import TORCH_PARTS

POISON = 0xA5


class LateEvent:
    """An event that completes when the host waits for it. arrivals: functions that execute the
    copies."""

    def __init__(self, device, arrivals=()):
        self.device, self.arrivals, self.is_past = device, arrivals, False

    def query(self):
        return self.is_past

    @torch.inference_mode()
    def synchronize(self):
        self.device.num_waits += 1
        if not self.is_past:
            self.is_past = True
            for arrive in self.arrivals:
                arrive()


class LateDevice:
    """The fake device. pinned: all pinned memory. num_waits: how often the host has waited."""

    def __init__(self):
        self.pinned, self.num_waits, self.fails = [], 0, None

    def pinned_zeros(self, num_bytes):
        self.pinned.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.pinned[-1]

    def record(self):
        return LateEvent(self)

    def fetch(self, sources, targets):
        def arrival(source, target):
            expected = source.clone()
            assert source.is_contiguous() and source.shape == target.shape
            assert source.dtype == target.dtype
            target.view(torch.uint8).fill_(POISON)

            def arrive():
                if self.fails is not None:
                    raise self.fails
                assert torch.equal(source, expected), (
                    "the source of a copy was written to before the copy was done"
                )
                assert (target.view(torch.uint8) == POISON).all(), (
                    "the target of a copy was written to before the copy was done"
                )
                target.copy_(source)

            return arrive

        return LateEvent(self, [arrival(*pair) for pair in zip(sources, targets, strict=True)])


def late_parts(**more):
    """Return device parts for a runner on a new `LateDevice`."""
    return replace(TORCH_PARTS, asynchronous=LateDevice(), **more)
