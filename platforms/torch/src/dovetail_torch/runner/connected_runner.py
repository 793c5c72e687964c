"""A model runner that calls the worker side of a KV connector before and after each forward pass.

Selected at startup, so that an engine without a connector has no overhead. This module does not
depend on which connector is used or on the messages between its two sides.
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
        """side: the connector's worker side.

        It receives the cache's pages and is shut down on failure.
        Raises ConfigError if blocks are not the first dimension in the backend's layout.
        """
        if not attention.buffers.pages_NP:
            raise ConfigError(
                "a kv_connector copies whole blocks, but there is no KV cache, or blocks are not "
                "the first dimension in the layout of the attention backend; choose another "
                "attention_backend, or remove kv_connector."
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
        """Execute the plan's KV transfers, apply the plan and run the model."""
        self._side.begin(plan.kv_transfer)
        super().execute_model(plan)
        self._answer = self._side.finish()

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> ModelRunnerOutput:
        """Sample from the logits of the last plan. Add the connector's results."""
        output = super().sample_tokens(grammar)
        assert isinstance(output, ModelRunnerOutput), (
            "a KV connector requires a worker with synchronous steps"
        )
        return replace(output, kv_transfer=self._answer) if self._answer else output

    def shutdown(self) -> None:
        """Shut down the connector's worker side. May be called twice."""
        super().shutdown()
        self._side.shutdown()


def make_worker_side(context: WorkerContext, kv_cache: KVCacheConfig) -> KVWorkerSide:
    """Return the worker side of the configured connector.

    Raises PluginError if it cannot be loaded or created.
    """
    reference = context.config.kv_connector
    assert reference is not None, "this runner was created without a KV connector"
    cls = context.plugins.load("kv_connector", reference)
    connector_context = KVConnectorContext(
        config=context.config,
        kv_cache=kv_cache,
        rank=context.rank,
        options=context.plugins.options_of("kv_connector", cls),
    )
    side: KVWorkerSide = construct("kv_connector", cls.create_worker_side, connector_context)
    return side
