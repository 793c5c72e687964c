"""A model runner with a KV connector: its worker side is called around each forward pass.

Chosen at the start, so that an engine without a connector has nothing of it in its steps. Depends
on no connector by name, and not what the bytes mean that pass between its sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from dovetail.errors import ConfigError
from dovetail.interfaces import (
    GrammarOutput,
    KVCacheConfig,
    KVConnectorContext,
    KVWorkerSide,
    StepExtension,
    WorkerContext,
)
from dovetail.plan import SchedulerOutput
from dovetail.plugins.construction import construct
from dovetail.result import ModelRunnerOutput
from dovetail_torch.runner.kv_cache import AttentionState
from dovetail_torch.runner.loaded_model import LoadedModel
from dovetail_torch.runner.model_runner import ModelRunner


class ConnectedRunner(ModelRunner):
    """Runs one model on one device and moves KV blocks through a connector."""

    def __init__(
        self,
        loaded: LoadedModel,
        attention: AttentionState,
        extensions: Mapping[str, StepExtension] = MappingProxyType({}),
        *,
        side: KVWorkerSide,
    ) -> None:
        """side: the connector's; it is given the cache's pages here, and shut down if it fails.

        Raises ConfigError where a block is not a row of memory in the backend's layout.
        """
        if not attention.buffers.pages_NP:
            raise ConfigError(
                "a kv_connector moves whole blocks, but there is no cache, or in the layout of the "
                "attention backend blocks do not come first; choose another attention_backend, or "
                "leave the connector out."
            )
        super().__init__(loaded, attention, extensions)
        self._answer = b""
        self._side = side
        try:
            side.register(self.cache_pages)
        except BaseException:
            side.shutdown()
            raise

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Carry out the plan's KV transfers, apply the plan and run the model."""
        self._side.begin(plan.kv_transfer)
        super().execute_model(plan)
        self._answer = self._side.finish()

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> ModelRunnerOutput:
        """Sample from the logits of the plan just executed; add the connector's answer."""
        output = super().sample_tokens(grammar)
        assert isinstance(output, ModelRunnerOutput), "a connected runner waits for its steps"
        return replace(output, kv_transfer=self._answer) if self._answer else output

    def shutdown(self) -> None:
        """End the connector's side. May be called twice."""
        super().shutdown()
        self._side.shutdown()


def make_worker_side(context: WorkerContext, kv_cache: KVCacheConfig) -> KVWorkerSide:
    """Return the side of `context`'s worker of the connector that its configuration names.

    Raises PluginError if it cannot be loaded or made.
    """
    reference = context.config.kv_connector
    assert reference is not None, "asked only where there is one"
    cls = context.plugins.load("kv_connector", reference)
    given = KVConnectorContext(
        config=context.config,
        kv_cache=kv_cache,
        rank=context.rank,
        options=context.plugins.options_of("kv_connector", cls),
    )
    side: KVWorkerSide = construct("kv_connector", cls.create_worker_side, given)
    return side
