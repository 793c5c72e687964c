"""The resolved configuration of an engine, and the parts of it that contracts carry.

A resolved field is never "auto", and it is None only where None is a value of its own (the list,
with a reason for each field, is in `tests/architecture/test_resolved_config.py`). A resolved
section is the requested section with its open fields narrowed. A change here is a change of the
contracts that carry the section.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from dovetail.interfaces.config_fields import (
    KV_CACHE_DTYPES,
    MODEL_DTYPES,
    ChosenReference,
    ConfigNode,
    Flag,
    FrozenMapping,
    OptionalReference,
    PluginReferences,
    Share,
    dtype_name,
    integer,
)
from dovetail.interfaces.requested_config import (
    MAX_BLOCK_SIZE,
    MAX_INT,
    MAX_LOOKAHEAD_TOKENS,
    MAX_NUM_SEQS,
    MAX_PIPELINE_DEPTH,
    MAX_WORKERS,
    CheckpointFields,
    CommonSections,
    PluginsConfig,
    RequestedCache,
    RequestedCompute,
    RequestedLoad,
    RequestedModel,
    RequestedParallel,
    RequestedScheduler,
)
from dovetail.sampling_params import MAX_LOGPROBS

N = TypeVar("N", bound=ConfigNode)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A value that resolution set, and why. field: "section.field"."""

    field: str
    before: Any
    after: Any
    reason: str


class CheckpointConfig(CheckpointFields):
    """What a worker knows about the model. max_model_len: tokens of prompt and output together."""

    dtype: Annotated[str, dtype_name(MODEL_DTYPES, resolved=True)]
    max_model_len: Annotated[int, integer(2, MAX_INT)]


class ModelConfig(RequestedModel):
    """Which model, and how it is read; resolved."""

    tokenizer_mode: ChosenReference
    dtype: Annotated[str, dtype_name(MODEL_DTYPES, resolved=True)]
    max_model_len: Annotated[int, integer(2, MAX_INT)]


class CacheConfig(RequestedCache):
    """The KV cache; resolved."""

    block_size: Annotated[int, integer(1, MAX_BLOCK_SIZE)]
    gpu_memory_utilization: Share
    kv_cache_dtype: Annotated[str, dtype_name(KV_CACHE_DTYPES, resolved=True)]


class SchedulerConfig(RequestedScheduler):
    """The limits of a step and of the scheduler; resolved."""

    scheduler_cls: ChosenReference
    max_num_seqs: Annotated[int, integer(1, MAX_NUM_SEQS)]
    max_num_batched_tokens: Annotated[int, integer(1, MAX_INT)]
    enable_chunked_prefill: Flag
    async_scheduling: Flag
    pipeline_depth: Annotated[int, integer(1, MAX_PIPELINE_DEPTH)]
    encoder_cache_tokens: Annotated[int, integer(0, MAX_INT)]


class ParallelConfig(RequestedParallel):
    """Where the work is done, and by how many workers; resolved. platform: its name or class."""

    platform: ChosenReference
    worker_cls: ChosenReference | None
    executor_backend: ChosenReference


class LoadConfig(RequestedLoad):
    """How weights are loaded; resolved."""

    load_format: ChosenReference


class ComputeConfig(RequestedCompute):
    """The plugins that compute; resolved."""

    attention_backend: ChosenReference | None
    linear_method: ChosenReference | None
    ops: ChosenReference | None


class WorkerConfig(ConfigNode):
    """The part of the configuration that decides what a worker computes.

    max_num_seqs, max_num_batched_tokens: rows and tokens of the largest step. num_lookahead_tokens,
    max_num_encoder_tokens, encoder_cache_tokens: as in SchedulerConfig. platform, worker_cls:
    as in ParallelConfig. logits_processors, step_extensions, kv_connector: plugins that the worker
    makes.
    """

    model: CheckpointConfig
    cache: CacheConfig
    load: LoadConfig
    compute: ComputeConfig
    max_num_seqs: Annotated[int, integer(1, MAX_NUM_SEQS)]
    max_num_batched_tokens: Annotated[int, integer(1, MAX_INT)]
    num_lookahead_tokens: Annotated[int, integer(0, MAX_LOOKAHEAD_TOKENS)]
    max_num_encoder_tokens: Annotated[int, integer(0, MAX_INT)]
    encoder_cache_tokens: Annotated[int, integer(0, MAX_INT)]
    tensor_parallel_size: Annotated[int, integer(1, MAX_WORKERS)]
    platform: ChosenReference
    worker_cls: ChosenReference | None
    logits_processors: PluginReferences
    step_extensions: PluginReferences
    kv_connector: OptionalReference


class ExecutorConfig(ConfigNode):
    """The part of the configuration that an executor needs to start and drive its workers.

    worker: for each worker. worker_extension_cls: methods to be added to the worker's class.
    max_concurrent_steps: how many steps the engine hands out at a time. max_logprobs: entries of a
    position, for the size of results. plugins, plugin_options: for the registry of a process that
    a worker lives in.
    """

    worker: WorkerConfig
    worker_extension_cls: OptionalReference
    max_concurrent_steps: Annotated[int, integer(1, MAX_PIPELINE_DEPTH)]
    max_logprobs: Annotated[int, integer(0, MAX_LOGPROBS)]
    start_timeout_s: Annotated[int, integer(1, MAX_INT)]
    plugins: PluginsConfig
    plugin_options: FrozenMapping


class EngineConfig(CommonSections):
    """The resolved configuration of one engine.

    changes: what resolution set, oldest first; shipped along, so that every process can explain
    itself.
    """

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    load: LoadConfig
    compute: ComputeConfig
    changes: tuple[Change, ...] = ()

    def explain(self) -> list[Change]:
        """Return every value that resolution set, with its reason, in order."""
        return list(self.changes)

    def worker_config(self) -> WorkerConfig:
        """Return the part that workers get."""
        sections = {
            **dict(self.scheduler),
            **dict(self.parallel),
            **dict(self.extensions),
            **dict(self),
            "model": _part(CheckpointConfig, dict(self.model)),
        }
        return _part(WorkerConfig, sections)

    def executor_config(self) -> ExecutorConfig:
        """Return the part that the executor gets."""
        return ExecutorConfig(
            worker=self.worker_config(),
            worker_extension_cls=self.extensions.worker_extension_cls,
            max_concurrent_steps=self.scheduler.pipeline_depth,
            max_logprobs=self.model.max_logprobs,
            start_timeout_s=self.parallel.start_timeout_s,
            plugins=self.plugins,
            plugin_options=self.plugin_options,
        )


def _part(cls: type[N], values: dict[str, Any]) -> N:
    """Return a node of `cls` with those of `values` that it has fields for."""
    return cls(**{name: values[name] for name in cls.model_fields})
