"""The platform of the bigram worker: any machine that runs Python. Selected only by name."""

from __future__ import annotations

import os
from collections.abc import Sequence

from dovetail.interfaces import Platform, PlatformInfo, Probe


class BigramPlatform(Platform):
    """The platform of any machine with numpy."""

    info = PlatformInfo(name="bigram", device_type="cpu")
    automatic = False

    @classmethod
    def probe(cls) -> Probe:
        """Report that this machine is usable."""
        return Probe(usable=True)

    def capabilities(self) -> frozenset[str]:
        """Return the only dtype that the worker supports."""
        return frozenset({"dtype.float32"})

    def total_memory_bytes(self, local_rank: int = 0) -> int:
        """Return the memory of the machine, in bytes."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def prefer(self, kind: str) -> Sequence[str]:
        """Return the bigram worker as the preferred worker."""
        return ("bigram",) if kind == "worker" else ()
