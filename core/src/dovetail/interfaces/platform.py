"""The contract of a platform: capabilities and preferred defaults of one kind of machine.

A platform reports its properties and proposes defaults. It never changes a configuration in place.
Code must check for a capability, not for a platform's name. Device operations belong to its
`runtime`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from dovetail.interfaces.engine_config import EngineConfig
    from dovetail.interfaces.requested_config import RequestedConfig


@dataclass(frozen=True, kw_only=True)
class PlatformInfo:
    """The name of a platform and torch's name of its device type, such as "cpu"."""

    name: str
    device_type: str


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Whether a platform or plugin can be used on this machine, and the reasons if not."""

    usable: bool
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ConfigPatch:
    """Values that a platform proposes for options that the user left open.

    changes: maps "section.field" to (value, reason). The engine applies and records them.
    """

    changes: Mapping[str, tuple[object, str]] = field(default_factory=dict)


class Platform(ABC):
    """The base class of platforms. A platform is one kind of machine."""

    CONTRACT: ClassVar[str] = "platform"
    CONTRACT_VERSION: ClassVar[str] = "0.6"
    info: ClassVar[PlatformInfo]
    automatic: ClassVar[bool] = True
    """Whether automatic selection may select the platform; if False, the user must name it."""
    rank: ClassVar[int] = 0
    """If several platforms are usable, the one with the highest rank is selected."""
    assumed: str = ""
    """The architecture of a platform from `assume`, such as "sm_90"; "" for this machine."""

    def __init__(self) -> None:  # noqa: B027  # optional to override
        """Create the platform. Do not use a device.

        If the plugin has an options model, this method must accept the keyword `options=None`: the
        validated options as a mapping.
        """

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Return whether this machine is supported.

        Do not create a device context or change anything.
        """

    @classmethod
    def assume(cls, architecture: str) -> Platform:
        """Return the platform as if this machine had one device of `architecture`.

        It reports what plugins need, but has no runtime. Raises ConfigError if the platform
        does not support it, or for an unknown architecture.
        """
        raise ConfigError(
            f"the platform {cls.info.name!r} cannot assume a device that this machine does not "
            "have; platforms such as 'cuda' and 'rocm' can."
        )

    @abstractmethod
    def capabilities(self) -> frozenset[str]:
        """Return capability ids, such as "dtype.bfloat16", "graphs", "sleep", "pin_memory"."""

    @abstractmethod
    def total_memory_bytes(self, local_rank: int = 0) -> int:
        """Return the memory of the device that `local_rank` would use, in bytes."""

    def prefer(self, kind: str) -> Sequence[str]:
        """Return the names of the preferred plugins of a kind, best first, or () for no preference.

        kind: "worker", "attention", "executor", "ops" or "linear_method".
        """
        return ()

    def defaults(self, config: RequestedConfig) -> ConfigPatch:
        """Return values for options that are "auto" or None in `config`."""
        return ConfigPatch()

    def prepare(self, config: RequestedConfig) -> None:  # noqa: B027  # optional to override
        """Start to load what the worker will need, such as shared libraries, in the background.

        Called once per engine, in a thread of the process that starts it, before `defaults`. Return
        immediately, and do not use a device: after 30 seconds the start continues with a warning.
        The engine may fail to start afterwards, so do not write files. `explain` does not call this
        method.
        """

    def problems(self, config: EngineConfig) -> Sequence[str]:
        """Return the reasons why this configuration cannot run here, one sentence each."""
        return ()

    def runtime(self) -> object:
        """Return an object with device operations for this platform's workers, or None.

        The platform and its workers agree on its type; the core does not use it.
        """
        return None
