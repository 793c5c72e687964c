"""The CUDA platform: the capabilities of NVIDIA devices and the plugins that they prefer.

All facts come from `machine.look`. The platform imports no torch and uses no device. At startup it
rejects unsupported configurations with a reason. If the user has selected this platform, the engine
never uses another platform instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from dovetail.errors import CapacityError, ConfigError
from dovetail.interfaces import ConfigPatch, Platform, PlatformInfo, Probe
from dovetail_cuda.machine import (
    Machine,
    assumed_machine,
    describe,
    look,
    reasons_against,
)

if TYPE_CHECKING:
    from dovetail.config import EngineConfig, RequestedConfig
    from dovetail_cuda.runtime import CUDARuntime

_PREFERENCES = {
    "worker": ("cuda",),
    "executor": ("uniproc", "multiproc"),
    "attention": ("triton", "torch"),
    "linear_method": ("torch",),
    "ops": ("triton", "torch"),
}
_WISHES = {
    "cache.gpu_memory_utilization": (0.9, "only this engine uses the device's memory"),
    "scheduler.async_scheduling": (True, "the host can schedule while the device computes"),
}
_SINCE = {"dtype.bfloat16": (8, 0), "dtype.fp8_e4m3": (8, 9), "dtype.fp8_e5m2": (8, 9)}
"""The dtypes that need hardware support, each with the minimum compute capability."""
_FP8 = "fp8"


class CUDAPlatform(Platform):
    """A machine with NVIDIA devices, their driver and a torch built for them."""

    info: ClassVar[PlatformInfo] = PlatformInfo(name="cuda", device_type="cuda")
    rank: ClassVar[int] = 100
    look: ClassVar[Callable[[], Machine]] = staticmethod(look)
    """A function that returns the facts of this machine."""

    @classmethod
    def probe(cls) -> Probe:
        """Return whether a device is usable, without creating a context."""
        machine = cls.look()
        reasons = reasons_against(machine)
        return Probe(usable=not reasons, reasons=reasons or describe(machine))

    @classmethod
    def assume(cls, architecture: str) -> CUDAPlatform:
        """Return the platform of a machine with one device, such as "sm_90"."""
        machine = assumed_machine(architecture)
        if reasons := reasons_against(machine):
            raise ConfigError("; ".join(reasons))
        platform = cls()
        platform._machine = machine
        platform.assumed = architecture
        return platform

    @cached_property
    def _machine(self) -> Machine:
        return self.look()

    @property
    def _capability(self) -> tuple[int, int]:
        """The lowest compute capability of all devices. An engine may use all of them."""
        return min((card.capability for card in self._machine.cards), default=(0, 0))

    def capabilities(self) -> frozenset[str]:
        """Return the dtypes, and support for pinned memory and collective operations."""
        dtypes = {name for name, since in _SINCE.items() if self._capability >= since}
        always = {"dtype.float32", "dtype.float16", "pin_memory", "collectives"}
        return frozenset(always | dtypes)

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
        return ConfigPatch(changes=_WISHES)

    def problems(self, config: EngineConfig) -> Sequence[str]:
        """Return the reasons why these devices cannot run this configuration."""
        problems = []
        num_cards, num_ranks = len(self._machine.cards), config.parallel.tensor_parallel_size
        if num_ranks > num_cards:
            problems.append(
                f"tensor_parallel_size={num_ranks} exceeds the number of devices ({num_cards}); "
                "reduce it."
            )
        dtype, major_minor = config.cache.kv_cache_dtype, self._capability
        if dtype.startswith(_FP8) and f"dtype.{dtype}" not in self.capabilities():
            problems.append(
                f"kv_cache_dtype={dtype!r} needs compute capability 8.9, but the device has "
                f"{major_minor[0]}.{major_minor[1]}; set kv_cache_dtype='auto'."
            )
        return problems

    def runtime(self) -> CUDARuntime:
        """Return the device runtime of this process."""
        from dovetail_cuda.runtime import CUDARuntime  # imports torch, which only workers need

        return CUDARuntime()
