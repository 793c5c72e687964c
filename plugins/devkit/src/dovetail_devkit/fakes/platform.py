"""A fake platform that is always available."""

from __future__ import annotations

from typing import ClassVar

from dovetail.interfaces.platform import Platform, PlatformInfo, Probe

MEMORY_BYTES = 1 << 30


class FakePlatform(Platform):
    """A platform with 1 GiB of memory and float32. Never selected automatically."""

    info: ClassVar[PlatformInfo] = PlatformInfo(name="fake", device_type="cpu")
    automatic: ClassVar[bool] = False

    @classmethod
    def probe(cls) -> Probe:
        """Return a probe with usable=True."""
        return Probe(usable=True)

    def capabilities(self) -> frozenset[str]:
        """Return one dtype as the only capability."""
        return frozenset({"dtype.float32"})

    def total_memory_bytes(self, local_rank: int = 0) -> int:
        """Return a constant number of bytes."""
        return MEMORY_BYTES
