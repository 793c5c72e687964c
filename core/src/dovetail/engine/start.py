"""Starts an engine core from a configuration: chooses, creates and sizes every part.

This module alone defines the order of the startup phases of
`dovetail.processes.startup_phases`. Each part is chosen by `dovetail.plugins` and created from its
contract's context; if one fails, the earlier ones are shut down again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from dovetail.clock import Clock, MonotonicClock
from dovetail.config import EngineConfig, RequestedConfig
from dovetail.config.compile_level import NO_COMPILATION
from dovetail.config.resolve import resolve
from dovetail.decision_log import DecisionRecorder, RecordedScheduler
from dovetail.engine.attention_check import check_attention
from dovetail.engine.core import EngineCore
from dovetail.engine.input.params_checks import load_rules
from dovetail.engine.kv_connection import check_kv_connector, make_scheduler_side
from dovetail.engine.plugin_choices import (
    check_options_are_used,
    check_plugin_choices,
    make_registry,
)
from dovetail.engine.scheduler_options import check_scheduler_options, make_gates, make_limits
from dovetail.engine.structured_output import StructuredOutput, make_structured_output
from dovetail.errors import ConfigError, ContractError
from dovetail.interfaces import (
    Executor,
    ExecutorContext,
    KVCacheConfig,
    ModelInfo,
    Platform,
    SchedulerContext,
    SchedulerInterface,
    WorkerBase,
)
from dovetail.kv_cache.grouping import group_layers, padding_share
from dovetail.kv_cache.sizing import Load, fit_model_len, size_cache
from dovetail.plugins import PluginRegistry
from dovetail.plugins.capabilities import declared_ids
from dovetail.plugins.construction import construct
from dovetail.plugins.selection import AUTO, choose, choose_scheduler, prepare_platform
from dovetail.plugins.working_directory import check_working_directory
from dovetail.processes.startup_phases import PhaseRecord, StartUp, describe_phases
from dovetail.value_checks import shorten

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StartedEngine:
    """An engine core and the properties that its front end needs.

    max_model_len: maximum tokens of a request, prompt and output, that fit the cache.
    phases: the startup phases, with their durations.
    """

    core: EngineCore
    config: EngineConfig
    model_info: ModelInfo
    kv_cache: KVCacheConfig
    max_model_len: int
    plugins: PluginRegistry
    clock: Clock
    phases: tuple[PhaseRecord, ...] = ()

    @property
    def phase_facts(self) -> tuple[tuple[str, float, int], ...]:
        """The phases as plain data: name, seconds, growth of this process's memory in bytes."""
        return tuple(
            (phase.name, phase.took_s, phase.after_bytes - phase.before_bytes)
            for phase in self.phases
        )


def start_engine(
    requested: RequestedConfig,
    *,
    clock: Clock | None = None,
    plugins: PluginRegistry | None = None,
    notify_phase: Callable[[str], None] | None = None,
) -> StartedEngine:
    """Choose, create and connect all parts. If one fails, raise a DovetailError that names it.

    plugins: a registry whose choices have been checked; None to create one.
    notify_phase: called with the name of each phase as it begins. The `phase` of an error is the
    one in which it was raised; everything created before has been shut down.
    """
    check_working_directory()
    clock = clock or MonotonicClock()
    deadline_s = requested.parallel.start_timeout_s
    with StartUp(clock, deadline_s=deadline_s, notify=notify_phase) as start:
        start.enter("plugins")
        if plugins is None:
            plugins = make_registry(requested)
            check_plugin_choices(requested, plugins)
        plugins.warn_of_installations()
        started = _start_parts(start, requested, plugins, clock)
    _log_start(started)
    logger.info(describe_phases(start.records))
    return replace(started, phases=tuple(start.records))


def _start_parts(
    start: StartUp, requested: RequestedConfig, plugins: PluginRegistry, clock: Clock
) -> StartedEngine:
    start.enter("platform")
    platform = prepare_platform(plugins, requested)
    start.enter("configuration")
    config = _resolve(requested, platform, plugins)
    start.enter("select_plugins")
    scheduler_cls, policy_cls = choose_scheduler(plugins, config.scheduler.scheduler_cls)
    executor_cls = choose(plugins, platform, "executor", config.parallel.executor_backend)
    worker_cls = choose(plugins, platform, "worker", config.parallel.worker_cls or AUTO)
    _check_options(config, executor_cls, worker_cls, scheduler_cls)
    rules = load_rules(config, plugins, worker_cls)
    start.enter("executor")
    executor = _make_executor(executor_cls, config, platform, plugins, worker_cls)
    start.undo(executor.shutdown)
    start.enter("model_facts")
    info = _model_info(executor)
    start.enter("size_cache")
    kv_cache = _size_cache(executor, config)
    max_model_len = _model_len(config, requested, info, kv_cache)
    start.enter("warm_up")
    executor.initialize_cache(kv_cache)
    start.enter("scheduler")
    structured = _structured_output(start, config, plugins, scheduler_cls, info)
    with ExitStack() as undo:
        context = SchedulerContext(
            limits=make_limits(config, max_model_len, info),
            kv_cache=kv_cache,
            clock=clock,
            policy=policy_cls,
            seed=config.model.seed,
            options=plugins.options_of("scheduler", scheduler_cls),
            policy_options=plugins.options_of("policy", policy_cls),
            gates=make_gates(config, plugins, scheduler_cls, clock, structured, undo),
            kv_connector=make_scheduler_side(config, plugins, kv_cache, undo),
            kv_transfer_timeout_s=config.extensions.kv_transfer_timeout_s,
            admission_timeout_s=config.scheduler.admission_timeout_s,
        )
        scheduler = _make_scheduler(scheduler_cls, context, config.observability.decision_log)
        undo.pop_all()  # the scheduler's `shutdown` calls those of its parts
    start.undo(scheduler.shutdown)
    start.enter("core")
    core = EngineCore(
        executor,
        scheduler,
        vocab_size=info.vocab_size,
        max_model_len=max_model_len,
        rules=replace(rules, model_info=info),
        structured_output=structured,
    )
    return StartedEngine(
        core=core,
        config=config,
        model_info=info,
        kv_cache=kv_cache,
        max_model_len=max_model_len,
        plugins=plugins,
        clock=clock,
    )


def _resolve(
    requested: RequestedConfig, platform: Platform, plugins: PluginRegistry
) -> EngineConfig:
    config = resolve(requested, platform, plugins)
    check_options_are_used(config, plugins)
    return config


def _model_info(executor: Executor) -> ModelInfo:
    info = executor.get_model_info()
    if not isinstance(info, ModelInfo):
        raise _wrong_result("get_model_info", info, "a ModelInfo")
    return info


def _structured_output(
    start: StartUp,
    config: EngineConfig,
    plugins: PluginRegistry,
    scheduler_cls: type[SchedulerInterface],
    info: ModelInfo,
) -> StructuredOutput | None:
    created = make_structured_output(config, plugins, scheduler_cls, info.vocab_size)
    if created is not None:
        start.undo(created.shutdown)
    return created


def _check_options(
    config: EngineConfig,
    executor_cls: type[Executor],
    worker_cls: type[WorkerBase],
    scheduler_cls: type[SchedulerInterface],
) -> None:
    """Raise an error for an option that the chosen parts do not support."""
    check_kv_connector(config, worker_cls, scheduler_cls)
    check_scheduler_options(config, worker_cls, scheduler_cls)
    _check_memory_options(config, worker_cls)
    _check_compile_level(config, worker_cls)
    size, maximum = config.parallel.tensor_parallel_size, executor_cls.max_world_size
    if size > maximum:
        raise ConfigError(
            f"tensor_parallel_size={size}: the executor {executor_cls.__name__} supports at most "
            f"{maximum} worker{'s' if maximum > 1 else ''}; choose executor_backend='multiproc'."
        )


def _check_memory_options(config: EngineConfig, worker_cls: type[WorkerBase]) -> None:
    """Raise ConfigError for an option about the device's memory that the worker would ignore."""
    cache, provided = config.cache, declared_ids(worker_cls, "provides")
    custom = config.compute.custom_all_reduce
    if custom and config.parallel.tensor_parallel_size == 1:
        raise ConfigError("custom_all_reduce=True has no effect with tensor_parallel_size=1.")
    for option, value, capability in (
        ("enable_sleep_mode", cache.enable_sleep_mode, "sleep"),
        ("cpu_offload_gb", cache.cpu_offload_gb, "weight_offload"),
        ("custom_all_reduce", custom, "custom_all_reduce"),
    ):
        if value and capability not in provided:
            raise ConfigError(
                f"{option}={value} is not supported on the platform "
                f"{config.parallel.platform!r}: its worker {worker_cls.__name__} does not provide "
                f"{capability!r}. Omit {option}, or choose another platform or worker_cls."
            )


def _check_compile_level(config: EngineConfig, worker_cls: type[WorkerBase]) -> None:
    """Raise ConfigError if the worker would ignore compile_level."""
    level = config.compute.compile_level
    if level != NO_COMPILATION and "compile" not in declared_ids(worker_cls, "provides"):
        raise ConfigError(
            f"compile_level={level!r} is not supported by the worker {worker_cls.__name__}: it "
            "does not provide 'compile'. Omit compile_level, or choose another platform or "
            "worker_cls."
        )


def _make_executor(
    executor_cls: type[Executor],
    config: EngineConfig,
    platform: Platform,
    plugins: PluginRegistry,
    worker_cls: type[WorkerBase],
) -> Executor:
    check_attention(config, executor_cls, worker_cls, plugins, platform)
    context = ExecutorContext(
        config=config.executor_config(),
        platform=platform,
        plugins=plugins,
        worker_cls=worker_cls,
        options=plugins.options_of("executor", executor_cls),
        worker_options=plugins.options_of("worker", worker_cls),
    )
    executor: Executor = construct("executor", executor_cls, context)
    return executor


def _make_scheduler(
    scheduler_cls: type[SchedulerInterface], context: SchedulerContext, log: Path | None
) -> SchedulerInterface:
    scheduler: SchedulerInterface
    if log is None:
        scheduler = construct("scheduler", scheduler_cls, context)
        return scheduler
    recorder = DecisionRecorder(log, scheduler_cls, context)
    try:
        scheduler = construct("scheduler", scheduler_cls, recorder.context)
    except BaseException:
        recorder.close()
        raise
    return RecordedScheduler(scheduler, recorder)


def _size_cache(executor: Executor, config: EngineConfig) -> KVCacheConfig:
    cache, scheduler = config.cache, config.scheduler
    load = Load(
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=config.model.max_model_len,
        max_step_tokens=scheduler.max_num_batched_tokens + scheduler.num_lookahead_tokens,
    )
    specs = executor.get_kv_cache_specs()
    for spec in specs:
        if not isinstance(spec, Mapping):
            raise _wrong_result("get_kv_cache_spec", spec, "a mapping of layers to KVCacheSpec")
    groups = group_layers(
        specs,
        block_size=cache.block_size,
        max_model_len=load.max_model_len,
        max_step_tokens=load.max_step_tokens,
    )
    available = cache.kv_cache_memory_bytes or 0
    override = cache.num_gpu_blocks_override
    keeps_something = any(group.bytes_per_block for group in groups)
    if keeps_something and cache.kv_cache_memory_bytes is None and override is None:
        available = executor.determine_available_memory()
    num_blocks = None if override is None else override + 1
    return size_cache(groups, load, available_bytes=available, num_blocks=num_blocks)


def _wrong_result(method: str, result: object, due: str) -> ContractError:
    return ContractError(f"A worker returned {shorten(result)} for {method}; it must return {due}.")


def _model_len(
    config: EngineConfig, requested: RequestedConfig, info: ModelInfo, kv_cache: KVCacheConfig
) -> int:
    """Return the longest request allowed by the configuration, the model and the cache."""
    requested_len, limit = requested.model.max_model_len, info.max_model_len
    if requested_len is not None and limit and requested_len > limit:
        raise ConfigError(
            f"max_model_len={requested_len} is more than the {limit} positions that the loaded "
            f"model {config.model.architecture} supports; reduce it to {limit}."
        )
    maximum = config.model.max_model_len
    if limit and maximum > limit:
        logger.warning(
            "max_model_len is %d instead of %d: the model has fewer positions.", limit, maximum
        )
        maximum = limit
    length, reason = fit_model_len(
        kv_cache,
        max_model_len=maximum,
        max_step_tokens=config.scheduler.max_num_batched_tokens
        + config.scheduler.num_lookahead_tokens,
        requested_by_user=requested_len is not None,
    )
    if reason:
        logger.warning("max_model_len is %d instead of %d: %s.", length, maximum, reason)
    return length


def _log_start(started: StartedEngine) -> None:
    config, kv_cache, platform = started.config, started.kv_cache, started.plugins.platform
    logger.info(
        "%s on %s: %s, %d KV blocks of %d tokens, max_model_len %d.",
        config.model.architecture,
        "" if platform is None else platform.info.name,
        config.model.dtype,
        kv_cache.num_blocks - 1,
        kv_cache.block_size,
        started.max_model_len,
    )
    if len(kv_cache.groups) > 1:
        logger.info(
            "The KV cache has %d groups of layers; %.0f %% of its memory is padding.",
            len(kv_cache.groups),
            100 * padding_share(kv_cache.groups),
        )
