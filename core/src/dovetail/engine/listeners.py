"""Listeners: stat loggers and hooks that are notified when an engine starts, steps, fails or stops.

`Listeners.watch` wraps the engine's step function to notify listeners after each step; without
listeners it returns the function itself, so that they cost nothing. A listener that raises an
error is logged once and not called again; requests are not affected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack

from dovetail.clock import Clock
from dovetail.config import EngineConfig
from dovetail.engine.input.input_processor import user_request_id
from dovetail.errors import ConfigError, RequestError
from dovetail.interfaces import EngineCoreOutputs, StatLogger, StatLoggerContext, StepStats
from dovetail.plugins import PluginRegistry
from dovetail.plugins.construction import Options, make_instance
from dovetail.plugins.hooks import HookPlugins, Subscriber, failure
from dovetail.request import FinishReason

logger = logging.getLogger(__name__)

Step = Callable[[], EngineCoreOutputs | None]


class Listeners:
    """The listeners of one engine. Create it when the engine is ready. Not thread-safe."""

    def __init__(
        self, config: EngineConfig, plugins: PluginRegistry, hooks: HookPlugins, clock: Clock
    ) -> None:
        """Create the stat loggers, then notify the hooks that the engine has started.

        config: the resolved configuration. Raises PluginError or ConfigError, naming the failed
        plugin; the stat loggers created before it are closed.
        """
        self._hooks = hooks
        self._clock = clock
        self._stopped = False
        # Sums over the messages of one step. The step's last message has the statistics.
        self._num_new_tokens = self._num_finished = self._num_failed = 0
        with ExitStack() as undo:
            self._stat_loggers = _make_stat_loggers(config, plugins, clock, undo)
            undo.callback(hooks.notify_all, "on_engine_stop")
            hooks.notify("on_engine_start", config=config)
            undo.pop_all()
        self._step_subscribers = hooks.subscribers("on_step")
        self._error_subscribers = hooks.subscribers("on_request_error")

    def watch(self, step: Step) -> Step:
        """Return a function that calls `step` and then notifies the listeners."""
        if not (self._stat_loggers or self._step_subscribers or self._error_subscribers):
            return step

        def watched() -> EngineCoreOutputs | None:
            outputs = step()
            if outputs is not None:
                self.notify(outputs)
            return outputs

        return watched

    def notify(self, outputs: EngineCoreOutputs) -> None:
        """Notify the listeners of outputs and, with a step's last message, of the step."""
        failed = [end for end in outputs.finished if end.reason is FinishReason.ERROR]
        self._num_new_tokens += len(outputs.token_ids)
        self._num_finished += len(outputs.finished)
        self._num_failed += len(failed)
        if outputs.stats is not None:
            self._notify_step(
                StepStats(
                    scheduler=outputs.stats,
                    now_ns=self._clock.now_ns(),
                    num_new_tokens=self._num_new_tokens,
                    num_finished=self._num_finished,
                    num_failed=self._num_failed,
                )
            )
            self._num_new_tokens = self._num_finished = self._num_failed = 0
        for end in failed:
            self.request_failed(
                user_request_id(end.request_id),
                RequestError(end.message or "The engine reported no reason."),
            )

    def request_failed(self, request_id: str, error: RequestError) -> None:
        """Notify the listeners of a request that was rejected or ended with an error."""
        for subscriber in self._error_subscribers:
            try:
                subscriber.call(request_id=request_id, error=error)
            except Exception as raised:
                self._error_subscribers = _without(self._error_subscribers, subscriber, raised)

    def stop(self) -> None:
        """Notify the hooks that the engine stops, and close the stat loggers."""
        if self._stopped:
            return
        self._stopped = True
        self._hooks.notify_all("on_engine_stop")
        for stat_logger in self._stat_loggers:
            _close(stat_logger)

    def _notify_step(self, step: StepStats) -> None:
        for stat_logger in self._stat_loggers:
            try:
                stat_logger.record(step)
            except Exception as error:
                self._silence(stat_logger, error)
        for subscriber in self._step_subscribers:
            try:
                subscriber.call(step=step)
            except Exception as error:
                self._step_subscribers = _without(self._step_subscribers, subscriber, error)

    def _silence(self, stat_logger: StatLogger, error: Exception) -> None:
        logger.warning(
            "The stat logger %s failed and was closed: %s: %s.",
            type(stat_logger).__qualname__,
            type(error).__name__,
            error,
        )
        self._stat_loggers = tuple(item for item in self._stat_loggers if item is not stat_logger)
        _close(stat_logger)


def _make_stat_loggers(
    config: EngineConfig, plugins: PluginRegistry, clock: Clock, undo: ExitStack
) -> tuple[StatLogger, ...]:
    """Return the stat loggers that the user named. `undo` closes them after an error."""

    def context(own: Options) -> StatLoggerContext:
        return StatLoggerContext(
            served_model_name=config.model.served_model_name, start_ns=clock.now_ns(), options=own
        )

    created: dict[str, StatLogger] = {}
    for reference in config.extensions.stat_loggers:
        plugin = plugins.resolve("stat_logger", reference)
        if plugin.target in created:
            raise ConfigError(f"stat_loggers contains {plugin.name!r} twice; list it once.")
        created[plugin.target] = make_instance(plugins, "stat_logger", reference, context)
        undo.callback(_close, created[plugin.target])
    return tuple(created.values())


def _without(
    subscribers: tuple[Subscriber, ...], failed: Subscriber, error: Exception
) -> tuple[Subscriber, ...]:
    logger.warning("%s. This method is not called again.", failure(failed, error))
    return tuple(subscriber for subscriber in subscribers if subscriber is not failed)


def _close(stat_logger: StatLogger) -> None:
    try:
        stat_logger.close()
    except Exception as error:
        name = type(stat_logger).__qualname__
        logger.warning(
            "Closing the stat logger %s failed: %s: %s.", name, type(error).__name__, error
        )
