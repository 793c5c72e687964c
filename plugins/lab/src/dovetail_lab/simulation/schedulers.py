"""Creates the scheduler of a simulated engine."""

from __future__ import annotations

from pathlib import Path

from dovetail.clock import Clock
from dovetail.decision_log import DecisionRecorder, RecordedScheduler
from dovetail.interfaces import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVSchedulerSide,
    SchedulerContext,
    SchedulerInterface,
)
from dovetail.plugins import PluginPolicy, PluginRegistry
from dovetail.plugins.construction import construct
from dovetail.plugins.selection import choose_scheduler
from dovetail_lab.simulation.setup import EngineSetup


def make_scheduler(
    setup: EngineSetup,
    clock: Clock,
    decision_log: Path | None = None,
    *,
    kv_connector: KVSchedulerSide | None = None,
) -> SchedulerInterface:
    """Return the scheduler of an engine, with its policy.

    decision_log: a new file that records the scheduler, or None. Errors of the policy raise.
    kv_connector: the scheduler side of a KV connector, or None.
    Raises PluginError if the scheduler cannot be loaded, ConfigError for invalid options or a
    `decision_log` that cannot be written.
    """
    options = {**setup.options, **setup.policy_options}
    registry = PluginRegistry(
        policy=PluginPolicy(trust_local_code=setup.trust_local_code),
        options={setup.scheduler: options} if options else {},
    )
    scheduler_cls, policy_cls = choose_scheduler(registry, setup.scheduler)
    spec = FullAttentionSpec(
        block_size=setup.block_size, num_kv_heads=1, head_size=16, dtype="bfloat16"
    )
    context = SchedulerContext(
        limits=setup.limits,
        kv_cache=KVCacheConfig(
            num_blocks=setup.num_blocks,
            groups=(KVCacheGroup(layer_names=("layer",), spec=spec),),
        ),
        clock=clock,
        policy=policy_cls,
        seed=setup.seed,
        options=registry.options_of("scheduler", scheduler_cls),
        policy_options=registry.options_of("policy", policy_cls),
        strict=True,
        kv_connector=kv_connector,
    )
    scheduler: SchedulerInterface
    if decision_log is None:
        scheduler = construct("scheduler", scheduler_cls, context)
        return scheduler
    recorder = DecisionRecorder(decision_log, scheduler_cls, context)
    try:
        scheduler = construct("scheduler", scheduler_cls, recorder.context)
    except BaseException:
        recorder.close()
        raise
    return RecordedScheduler(scheduler, recorder)
