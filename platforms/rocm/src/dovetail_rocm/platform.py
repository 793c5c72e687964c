"""The ROCm platform: the capabilities of AMD devices and the plugins that they prefer.

torch names these devices "cuda"; the name of the platform and of its capability is "rocm". All
properties come from `machine.look`. The platform imports no torch and uses no device. It has not
been run on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from dovetail.errors import CapacityError
from dovetail.interfaces import ConfigPatch, Platform, PlatformInfo, Probe
from dovetail_rocm.machine import Machine, assumed_machine, describe, look, reasons_against

if TYPE_CHECKING:
    from dovetail.config import EngineConfig, RequestedConfig
    from dovetail_rocm.runtime import ROCmRuntime

_PREFERENCES = {
    "worker": ("rocm",),
    "executor": ("uniproc", "multiproc"),
    "attention": ("triton", "torch"),
    "linear_method": ("torch",),
    "ops": ("triton", "torch"),
}
_DEFAULTS = {
    "cache.gpu_memory_utilization": (0.9, "only this engine uses the device's memory"),
    "scheduler.async_scheduling": (True, "the host can schedule while the device computes"),
}
_WITH_BFLOAT16 = ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
"""Starts of the names of architectures with bfloat16 matrix units."""
_FP8 = "fp8"


class ROCmPlatform(Platform):
    """A machine with AMD devices, their driver and a torch built for them."""

    info: ClassVar[PlatformInfo] = PlatformInfo(name="rocm", device_type="cuda")
    rank: ClassVar[int] = 95
    look: ClassVar[Callable[[], Machine]] = staticmethod(look)
    """A function that returns the properties of this machine."""

    @classmethod
    def probe(cls) -> Probe:
        """Return whether a device is usable, without creating a context."""
        machine = cls.look()
        reasons = reasons_against(machine)
        return Probe(usable=not reasons, reasons=reasons or describe(machine))

    @classmethod
    def assume(cls, architecture: str) -> ROCmPlatform:
        """Return the platform of a machine with one device, such as "gfx942"."""
        platform = cls()
        platform._machine = assumed_machine(architecture)
        platform.assumed = architecture
        return platform

    @cached_property
    def _machine(self) -> Machine:
        return self.look()

    def capabilities(self) -> frozenset[str]:
        """Return the dtypes, and support for pinned memory and collective operations."""
        names = [card.architecture for card in self._machine.cards]
        has_bfloat16 = names and all(name.startswith(_WITH_BFLOAT16) for name in names)
        dtypes = {"dtype.bfloat16"} if has_bfloat16 else set()
        return frozenset({"dtype.float32", "dtype.float16", "pin_memory", "collectives"} | dtypes)

    def total_memory_bytes(self, local_rank: int = 0) -> int:
        """Return the device's memory. Raise CapacityError if the device does not exist."""
        cards = self._machine.cards
        if not 0 <= local_rank < len(cards):
            raise CapacityError(
                f"Device {local_rank} was requested, but the number of devices is {len(cards)}."
            )
        return cards[local_rank].total_bytes

    def prefer(self, kind: str) -> Sequence[str]:
        """Return the plugin names that this platform prefers, best first."""
        return _PREFERENCES.get(kind, ())

    def defaults(self, config: RequestedConfig) -> ConfigPatch:
        """Propose most of the device's memory, and asynchronous scheduling."""
        return ConfigPatch(changes=_DEFAULTS)

    def problems(self, config: EngineConfig) -> Sequence[str]:
        """Return the reasons why these devices cannot run this configuration."""
        problems = []
        num_cards, num_ranks = len(self._machine.cards), config.parallel.tensor_parallel_size
        if num_ranks > num_cards:
            problems.append(
                f"tensor_parallel_size={num_ranks} exceeds the number of devices ({num_cards}); "
                "reduce it."
            )
        dtype = config.cache.kv_cache_dtype
        if dtype.startswith(_FP8):
            problems.append(
                f"kv_cache_dtype={dtype!r} is not supported on ROCm; set kv_cache_dtype='auto'."
            )
        return problems

    def runtime(self) -> ROCmRuntime:
        """Return the device runtime of this process."""
        from dovetail_rocm.runtime import ROCmRuntime  # imports torch, which only workers need

        return ROCmRuntime()
