"""Fake hooks that record every notification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.errors import RequestError
from dovetail.interfaces.hooks import Hooks, HooksContext
from dovetail.interfaces.stat_logger import StepStats

if TYPE_CHECKING:
    from cyclopts import App

    from dovetail.config import EngineConfig


class FakeHooks(Hooks):
    """Records the calls to its hooks. calls: (hook, argument) of every call so far, in order."""

    def __init__(self, context: HooksContext) -> None:
        self.calls: list[tuple[str, object]] = []

    def register_cli(self, app: App) -> None:
        """Record the call to `register_cli`."""
        self.calls.append(("register_cli", app))

    def on_engine_start(self, config: EngineConfig) -> None:
        """Record the call to `on_engine_start`."""
        self.calls.append(("on_engine_start", config))

    def on_engine_stop(self) -> None:
        """Record the call to `on_engine_stop`."""
        self.calls.append(("on_engine_stop", None))

    def on_step(self, step: StepStats) -> None:
        """Record the call to `on_step`."""
        self.calls.append(("on_step", step))

    def on_request_error(self, request_id: str, error: RequestError) -> None:
        """Record the call to `on_request_error`."""
        self.calls.append(("on_request_error", (request_id, error)))
