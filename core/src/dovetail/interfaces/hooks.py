"""The contract of hooks: plugins that are told what happens, all of them, in any number.

Multicast only: nothing is selected, answered or changed by a hook. `HookSpecs` says which calls
there are; a plugin defines those that it wants, under their names, and is notified of no other.
They run for every engine, so they run only where the user enabled them (`EngineArgs.hooks`).
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
"""The project's name in pluggy."""

_specified = pluggy.HookspecMarker(PROJECT)


@dataclass(frozen=True, kw_only=True)
class HooksContext:
    """All that hooks are made from. options: the user's, from `plugin_options`."""

    options: Mapping[str, object] = field(default_factory=dict)


class HookSpecs:
    """The calls that there are. A plugin's method may leave out parameters that it does not need.

    Those of start and stop may take their time; `on_step` may not: it runs in the engine's loop.
    """

    @_specified
    def register_cli(self, app: App) -> None:
        """Add commands to the command line, before it is parsed (`DOVETAIL_HOOKS` enables this).

        Raising ends the command line with an error that names the plugin.
        """

    @_specified
    def on_engine_start(self, config: EngineConfig) -> None:
        """Hear that an engine is ready; `config` is resolved. Raising ends the start."""

    @_specified
    def on_engine_stop(self) -> None:
        """Hear that an engine is about to end, or that its start broke off; once.

        Raising gives a warning.
        """

    @_specified
    def on_step(self, step: StepStats) -> None:
        """Hear of a step. Raising gives one warning and unsubscribes."""

    @_specified
    def on_request_error(self, request_id: str, error: RequestError) -> None:
        """Hear that a request was refused, or ended with an error, and why.

        request_id: the caller's where it was refused, the engine core's where it had begun.
        Raising gives one warning and unsubscribes.
        """


class Hooks(ABC):
    """What every plugin of hooks is: made once an engine, or once a command line.

    Contract. Public methods named `on_…` or `register_…` are hooks of `HookSpecs`; any other such
    name is refused, since nobody would call it. Their parameters have the names of the
    specification.
    """

    CONTRACT: ClassVar[str] = "hooks"
    CONTRACT_VERSION: ClassVar[str] = "0.2"

    @abstractmethod
    def __init__(self, context: HooksContext) -> None:
        """Keep what is needed of `context`; start nothing yet."""
