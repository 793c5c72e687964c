"""Creates clients of an engine in this process, in a new process, or in a running process.

The channels are imported when they are used: an engine in this process needs no sockets.
"""

from __future__ import annotations

from typing import Literal, overload

from dovetail.clock import Clock
from dovetail.config import RequestedConfig
from dovetail.engine.channel import Channel, InprocChannel
from dovetail.engine.client import AsyncEngineClient, EngineClient
from dovetail.engine.supervision.rules import SupervisionRules
from dovetail.errors import ConfigError
from dovetail.plugins import PluginRegistry

ATTACH_TIMEOUT_S = 30.0


@overload
def make_client(
    config: RequestedConfig,
    kind: Literal["inproc", "sync"],
    *,
    plugins: PluginRegistry | None = None,
    rules: SupervisionRules | None = None,
    clock: Clock | None = None,
) -> EngineClient: ...
@overload
def make_client(
    config: RequestedConfig,
    kind: Literal["async"],
    *,
    rules: SupervisionRules | None = None,
    clock: Clock | None = None,
) -> AsyncEngineClient: ...


def make_client(
    config: RequestedConfig,
    kind: str,
    *,
    plugins: PluginRegistry | None = None,
    rules: SupervisionRules | None = None,
    clock: Clock | None = None,
) -> EngineClient | AsyncEngineClient:
    """Start an engine and return a client of it.

    kind: "inproc", "sync" (a process, called from one thread) or "async" (a process, called from an
    event loop). plugins: the registry for an engine in this process; None to create a registry.
    rules: when a failed engine is restarted; None for never. Raises ConfigError for another kind,
    and the errors of the engine's startup.
    """
    if kind == "inproc" and rules is None:
        return EngineClient(InprocChannel(config, plugins=plugins))
    if kind not in ("sync", "async"):
        raise ConfigError(
            f"kind={kind!r} is not an engine client; use 'inproc', 'sync' or 'async'. An "
            "engine in this process cannot be supervised."
        )

    from dovetail.engine.process.channel import ProcessChannel
    from dovetail.engine.process.engine_process import EngineProcess

    def start() -> ProcessChannel:
        return ProcessChannel(EngineProcess(config))

    channel: Channel
    if rules is None:
        channel = start()
    else:
        from dovetail.engine.supervision.channel import SupervisedChannel

        channel = SupervisedChannel(start, rules, clock=clock)
    return EngineClient(channel) if kind == "sync" else AsyncEngineClient(channel)


@overload
def attach_client(
    address: str, kind: Literal["sync"], *, timeout_s: float = ATTACH_TIMEOUT_S
) -> EngineClient: ...
@overload
def attach_client(
    address: str, kind: Literal["async"], *, timeout_s: float = ATTACH_TIMEOUT_S
) -> AsyncEngineClient: ...


def attach_client(
    address: str, kind: str, *, timeout_s: float = ATTACH_TIMEOUT_S
) -> EngineClient | AsyncEngineClient:
    """Return a client of an engine that another process has started.

    address: the `address` of its owner's client. kind: "sync" or "async". Raises ConfigError for an
    invalid address, EngineDeadError if no engine responds within `timeout_s` seconds.
    """
    if kind not in ("sync", "async"):
        raise ConfigError(
            f"kind={kind!r} is not a client of a running engine; use 'sync' or 'async'."
        )
    from dovetail.engine.process.attached_engine import AttachedEngine
    from dovetail.engine.process.channel import ProcessChannel

    channel = ProcessChannel(AttachedEngine(address, timeout_s=timeout_s))
    return EngineClient(channel) if kind == "sync" else AsyncEngineClient(channel)
