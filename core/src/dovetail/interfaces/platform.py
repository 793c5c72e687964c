"""The contract of a platform: what one kind of machine can do, and what suits it.

A platform answers questions and returns wishes; it changes nothing in place, and nobody asks it
for its identity: ask for a capability. Small on purpose; device work belongs to its `runtime`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from dovetail.interfaces.engine_config import EngineConfig
    from dovetail.interfaces.requested_config import RequestedConfig


@dataclass(frozen=True, kw_only=True)
class PlatformInfo:
    """Names of a platform: its own, and the device type as tensors are told it ("cpu", …)."""

    name: str
    device_type: str


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Whether something can be used here, and the reasons if not."""

    usable: bool
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ConfigPatch:
    """Values that a platform sets for options that the user left open.

    changes: "section.field" to (value, reason). The engine applies and records them.
    """

    changes: Mapping[str, tuple[object, str]] = field(default_factory=dict)


class Platform(ABC):
    """One kind of machine."""

    CONTRACT: ClassVar[str] = "platform"
    CONTRACT_VERSION: ClassVar[str] = "0.2"
    info: ClassVar[PlatformInfo]
    automatic: ClassVar[bool] = True
    """False: only a user's explicit choice takes this platform."""
    rank: ClassVar[int] = 0
    """Of several platforms that can be used here, the highest is taken."""

    def __init__(self) -> None:  # noqa: B027  # a default that may stay
        """Make it; touch no device.

        A plugin with an options model takes the keyword `options=None`: a mapping, validated.
        """

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Return whether this machine is one. Creates no device context, changes nothing."""

    @abstractmethod
    def capabilities(self) -> frozenset[str]:
        """Return capability ids, such as "dtype.bfloat16", "graphs", "sleep", "pin_memory"."""

    @abstractmethod
    def total_memory_bytes(self, local_rank: int = 0) -> int:
        """Return the memory of the device that `local_rank` would use, in bytes."""

    def prefer(self, kind: str) -> Sequence[str]:
        """Return the plugin names that suit here, best first; () for no opinion.

        Asked for "worker", "attention", "executor", "ops", "linear_method".
        """
        return ()

    def defaults(self, config: RequestedConfig) -> ConfigPatch:
        """Return values for options that the user left open: "auto" or None in `config`."""
        return ConfigPatch()

    def problems(self, config: EngineConfig) -> Sequence[str]:
        """Return why this configuration cannot run here, each a sentence; () if it can."""
        return ()

    def runtime(self) -> object:
        """Return the device operations for this platform's own workers; opaque to the core.

        What it is, is between a platform and the workers that it prefers.
        """
        return None
