"""Creates a scheduler's limits and admission gates, and checks the scheduler options.

This module does not depend on a specific scheduler or worker.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from dovetail.clock import Clock
from dovetail.errors import ConfigError
from dovetail.interfaces import AdmissionContext, AdmissionGate, ModelInfo, SchedulerLimits
from dovetail.interfaces.engine_config import EngineConfig
from dovetail.plugins import PluginRegistry
from dovetail.plugins.capabilities import declared_ids
from dovetail.plugins.construction import Options, make_instance

DRAFTS = "drafts"
"""The capability of a worker that proposes and verifies draft tokens."""
GATES = "gates"
"""The capability of a scheduler that uses admission gates."""
ENCODER = "encoder"
"""The capability of workers and schedulers that support multimodal encoder inputs."""


def check_scheduler_options(
    config: EngineConfig, worker_cls: type[Any], scheduler_cls: type[Any]
) -> None:
    """Raise ConfigError for a scheduler option that the worker or the scheduler would ignore."""
    options = config.scheduler
    if options.num_lookahead_tokens:
        option = f"num_lookahead_tokens={options.num_lookahead_tokens}"
        _check_declared(option, DRAFTS, ("worker", worker_cls))
    if options.max_num_encoder_tokens:
        option = f"max_num_encoder_tokens={options.max_num_encoder_tokens}"
        _check_declared(option, ENCODER, ("worker", worker_cls), ("scheduler", scheduler_cls))


def make_gates(
    config: EngineConfig,
    plugins: PluginRegistry,
    scheduler_cls: type[Any],
    clock: Clock,
    structured_output: AdmissionGate | None,
    undo: ExitStack,
) -> tuple[AdmissionGate, ...]:
    """Return the admission gates that the user named, and the gate for grammars.

    undo: gets the `shutdown` of each created gate. Raises ConfigError for a scheduler without
    gates, PluginError if a gate cannot be created.
    """
    references = config.extensions.admission_gates
    if references:
        _check_declared("admission_gates", GATES, ("scheduler", scheduler_cls))

    def context(options: Options) -> AdmissionContext:
        return AdmissionContext(clock=clock, options=options)

    gates = []
    for reference in references:
        gates.append(make_instance(plugins, "admission", reference, context))
        undo.callback(gates[-1].shutdown)
    return (*gates, structured_output) if structured_output is not None else tuple(gates)


def make_limits(config: EngineConfig, max_model_len: int, info: ModelInfo) -> SchedulerLimits:
    """Return the limits of the scheduler and of a step.

    info: the loaded model, which may need whole prompts in a step, or all tokens of a prompt.
    """
    limits = _configured_limits(config, max_model_len)
    if info.whole_prompts:
        limits = replace(limits, enable_chunked_prefill=False, long_prefill_token_threshold=0)
    is_cached = limits.enable_prefix_caching and info.resumes_prompts
    return replace(limits, enable_prefix_caching=is_cached)


def _configured_limits(config: EngineConfig, max_model_len: int) -> SchedulerLimits:
    options = config.scheduler
    return SchedulerLimits(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_chunked_prefill=options.enable_chunked_prefill,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        num_lookahead_tokens=options.num_lookahead_tokens,
        max_num_encoder_tokens=options.max_num_encoder_tokens,
        encoder_cache_tokens=options.encoder_cache_tokens,
    )


def _check_declared(option: str, capability: str, *parts: tuple[str, type[Any]]) -> None:
    for kind, cls in parts:
        if capability not in declared_ids(cls, "provides"):
            raise ConfigError(
                f"{option} would have no effect: the {kind} {cls.__qualname__} does not declare "
                f"{capability!r} in `provides`. Choose another {kind}_cls, or omit the option."
            )
