"""One way to an engine core, whatever side of a process border it is on."""

from __future__ import annotations

from typing import Literal, overload

from dovetail.config import RequestedConfig
from dovetail.engine.process.async_client import AsyncMPClient
from dovetail.engine.process.client import EngineClient, InprocClient
from dovetail.engine.process.sync_client import SyncMPClient
from dovetail.errors import ConfigError
from dovetail.plugins import PluginRegistry


@overload
def make_client(
    config: RequestedConfig,
    kind: Literal["inproc", "sync"],
    *,
    plugins: PluginRegistry | None = None,
) -> EngineClient: ...
@overload
def make_client(config: RequestedConfig, kind: Literal["async"]) -> AsyncMPClient: ...


def make_client(
    config: RequestedConfig, kind: str, *, plugins: PluginRegistry | None = None
) -> EngineClient | AsyncMPClient:
    """Start an engine and return the client that speaks with it.

    kind: "inproc", "sync" (a process, called from one thread) or "async" (a process, called from an
    event loop). plugins: for an engine in process; None for a registry of its own. Raises
    ConfigError for another kind, and what the engine's start raises.
    """
    if kind == "inproc":
        return InprocClient(config, plugins=plugins)
    if kind == "sync":
        return SyncMPClient(config)
    if kind == "async":
        return AsyncMPClient(config)
    raise ConfigError(f"kind={kind!r} is no engine client; it can be 'inproc', 'sync' or 'async'.")
