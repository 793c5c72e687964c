"""The resolved configuration of an engine, and its parts for workers and executors.

A resolved field is never "auto". It is None only if None is a valid value; the fields and reasons
are listed in `tests/architecture/test_resolved_config.py`. A resolved section is the requested
section with narrower types for its open fields. A change here changes every contract whose context
has the section.
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
    Text,
    dtype_name,
    integer,
    one_of,
)
from dovetail.interfaces.requested_config import (
    COMPILE_LEVELS,
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
    """A configuration value that resolution set, and the reason. field: "section.field"."""

    field: str
    before: Any
    after: Any
    reason: str


class CheckpointConfig(CheckpointFields):
    """The part of the model section that workers need.

    max_model_len: tokens of prompt and output together.
    """

    dtype: Annotated[str, dtype_name(MODEL_DTYPES, resolved=True)]
    max_model_len: Annotated[int, integer(2, MAX_INT)]


class ModelConfig(RequestedModel):
    """The resolved section for the model and its files."""

    tokenizer_mode: ChosenReference
    dtype: Annotated[str, dtype_name(MODEL_DTYPES, resolved=True)]
    max_model_len: Annotated[int, integer(2, MAX_INT)]


class CacheConfig(RequestedCache):
    """The resolved section for the KV cache."""

    block_size: Annotated[int, integer(1, MAX_BLOCK_SIZE)]
    gpu_memory_utilization: Share
    kv_cache_dtype: Annotated[str, dtype_name(KV_CACHE_DTYPES, resolved=True)]


class SchedulerConfig(RequestedScheduler):
    """The resolved section for the limits of a step and of the scheduler."""

    scheduler_cls: ChosenReference
    max_num_seqs: Annotated[int, integer(1, MAX_NUM_SEQS)]
    max_num_batched_tokens: Annotated[int, integer(1, MAX_INT)]
    enable_chunked_prefill: Flag
    async_scheduling: Flag
    pipeline_depth: Annotated[int, integer(1, MAX_PIPELINE_DEPTH)]
    encoder_cache_tokens: Annotated[int, integer(0, MAX_INT)]


class ParallelConfig(RequestedParallel):
    """The resolved section for processes, devices and workers. platform: a name or class."""

    platform: ChosenReference
    worker_cls: ChosenReference | None
    executor_backend: ChosenReference


class LoadConfig(RequestedLoad):
    """The resolved section for weight loading."""

    load_format: ChosenReference


class ComputeConfig(RequestedCompute):
    """The resolved section for plugins that compute."""

    attention_backend: ChosenReference | None
    linear_method: ChosenReference | None
    ops: ChosenReference | None
    compile_level: Annotated[str, one_of(*COMPILE_LEVELS)]
    compile_backend: ChosenReference | None
    compile_cache: Text | None


class WorkerConfig(ConfigNode):
    """The part of the configuration that determines what a worker computes.

    max_num_seqs, max_num_batched_tokens: maximum requests and tokens of a step.
    num_lookahead_tokens, max_num_encoder_tokens, encoder_cache_tokens: as in SchedulerConfig.
    platform, worker_cls: as in ParallelConfig. logits_processors, step_extensions, kv_connector:
    plugins that the worker constructs.
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

    worker: the part for each worker. worker_extension_cls: methods to add to the worker's class.
    max_concurrent_steps: maximum number of steps in flight. max_logprobs: maximum entries per
    position, which determines the size of results. plugins, plugin_options: settings of the plugin
    registry in a worker's process.
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

    changes: the values that resolution set, in order, with reasons.
    """

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    load: LoadConfig
    compute: ComputeConfig
    changes: tuple[Change, ...] = ()

    def explain(self) -> list[Change]:
        """Return the values that resolution set, with reasons, in order."""
        return list(self.changes)

    def worker_config(self) -> WorkerConfig:
        """Return the part of the configuration for workers."""
        sections = {
            **dict(self.scheduler),
            **dict(self.parallel),
            **dict(self.extensions),
            **dict(self),
            "model": _part(CheckpointConfig, dict(self.model)),
        }
        return _part(WorkerConfig, sections)

    def executor_config(self) -> ExecutorConfig:
        """Return the part of the configuration for the executor."""
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
    """Return a section of class `cls` with the `values` that are its fields."""
    return cls(**{name: values[name] for name in cls.model_fields})
