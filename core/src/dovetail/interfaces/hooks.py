"""The contract of hooks: plugins that are notified of events.

Any number of plugins may receive the same event. A hook returns nothing and changes nothing.
`HookSpecs` lists the events; a plugin defines methods with the names of those that it handles.
An installed hooks plugin runs only if the user enables it (`EngineArgs.hooks`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import pluggy

from dovetail.errors import RequestError
from dovetail.interfaces.stat_logger import StepStats

if TYPE_CHECKING:
    from cyclopts import App

    from dovetail.interfaces.engine_config import EngineConfig

PROJECT = "dovetail"
"""The project name to pass to pluggy."""

_specified = pluggy.HookspecMarker(PROJECT)


@dataclass(frozen=True, kw_only=True)
class HooksContext:
    """Constructor arguments of hooks. options: the user's options from `plugin_options`."""

    options: Mapping[str, object] = field(default_factory=dict)


class HookSpecs:
    """The events. A plugin's method may omit parameters that it does not need.

    `on_step` must be fast, because it runs in the engine's loop. Start and stop hooks may be slow.
    """

    @_specified
    def register_cli(self, app: App) -> None:
        """Add commands to the command line before it is parsed (`DOVETAIL_HOOKS` enables this).

        An exception ends the command with an error that names the plugin.
        """

    @_specified
    def on_engine_start(self, config: EngineConfig) -> None:
        """Called when the engine is ready. `config` is resolved. An exception stops the engine."""

    @_specified
    def on_engine_stop(self) -> None:
        """Handle an engine that is about to shut down or has failed to start. Called once.

        An exception is logged as a warning.
        """

    @_specified
    def on_step(self, step: StepStats) -> None:
        """Handle a finished step.

        After an exception one warning is logged, and the hook is not called again.
        """

    @_specified
    def on_request_error(self, request_id: str, error: RequestError) -> None:
        """Handle a request that was rejected or ended with an error.

        request_id: the caller's id if the request was rejected, otherwise the id in the engine
        core. After an exception one warning is logged, and the hook is not called again.
        """


class Hooks(ABC):
    """A hooks plugin, created once per engine or once per command line.

    Contract: Public methods named `on_…` or `register_…` must be hooks of `HookSpecs`, with
    parameters of the same names. Other methods with these prefixes are rejected.
    """

    CONTRACT: ClassVar[str] = "hooks"
    CONTRACT_VERSION: ClassVar[str] = "0.5"

    @abstractmethod
    def __init__(self, context: HooksContext) -> None:
        """Store `context`. Do not start anything yet."""
