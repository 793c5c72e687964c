"""The specification of a worker, which an executor sends to the process that creates the worker.

An executor whose workers run in its own process calls `construct_worker`. Any other executor sends
a `WorkerSpec` to the worker's process, calls `make_worker` there, and returns `describe_plugins` to
the engine, where `check_plugins` compares what the processes have loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, get_args

import msgspec

from dovetail.errors import ConfigError, ContractError, MessageError, PluginError
from dovetail.interfaces.engine_config import ExecutorConfig
from dovetail.interfaces.executor import ExecutorContext
from dovetail.interfaces.frozen_mapping import freeze
from dovetail.interfaces.plugin_lookup import PluginLookup
from dovetail.interfaces.worker import WorkerBase, WorkerContext
from dovetail.plugins import PluginRegistry
from dovetail.plugins.capabilities import declared_ids
from dovetail.plugins.construction import construct
from dovetail.plugins.extension import complete_worker_cls
from dovetail.plugins.resolving.plugin_policy import PluginPolicy
from dovetail.plugins.resolving.resolution import Resolution, compare_resolutions
from dovetail.plugins.selection import choose_platform
from dovetail.transport.wire_types import decode, encode

Phase = Literal["start", "plugins", "worker_cls", "init_device", "load_model"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""The startup phases of a worker's process, in order."""


class WorkerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The data that another process needs to create a worker.

    config: an `ExecutorConfig` as JSON. platform, worker: references for a plugin registry.
    rendezvous: where the workers meet, as in `WorkerContext`; "" for one worker.
    """

    config: str
    platform: str
    worker: str
    worker_options: dict[str, Any]
    rank: int
    local_rank: int
    world_size: int
    rendezvous: str = ""

    @classmethod
    def of(
        cls,
        context: ExecutorContext,
        *,
        rank: int = 0,
        local_rank: int | None = None,
        rendezvous: str = "",
    ) -> WorkerSpec:
        """Return the specification of the worker with this rank. local_rank: `rank` if None.

        Raises ContractError for a class that no other process can import, ConfigError for options
        that cannot be sent.
        """
        options = dict(context.worker_options)
        try:
            encode(options)
        except MessageError as error:
            raise ConfigError(
                f"plugin_options: the worker's options cannot be sent to its process: {error}"
            ) from None
        return cls(
            config=context.config.model_dump_json(),
            platform=_reference(context.plugins, "platform", type(context.platform)),
            worker=_reference(context.plugins, "worker", context.worker_cls),
            worker_options=options,
            rank=rank,
            local_rank=rank if local_rank is None else local_rank,
            world_size=context.config.worker.tensor_parallel_size,
            rendezvous=rendezvous,
        )


def construct_worker(
    context: ExecutorContext, *, rank: int = 0, local_rank: int = 0, rendezvous: str = ""
) -> WorkerBase:
    """Return a new worker of `context`, with the user's worker extension, if any."""
    worker: WorkerBase = construct(
        "worker",
        complete_worker_cls(context),
        WorkerContext(
            config=context.config.worker,
            platform=context.platform,
            plugins=context.plugins,
            rank=rank,
            local_rank=local_rank,
            world_size=context.config.worker.tensor_parallel_size,
            rendezvous=rendezvous,
            options=context.worker_options,
        ),
    )
    return worker


def has_async_output(worker: WorkerBase) -> bool:
    """Return whether `sample_tokens` of this worker may return a handle instead of a result."""
    return "async_output" in declared_ids(type(worker), "provides")


def make_worker(
    spec: WorkerSpec, enter: Callable[[Phase], object]
) -> tuple[WorkerBase, PluginRegistry]:
    """Choose and create the worker of `spec`. Return it with the registry of its plugins.

    enter: called with each phase before it begins. The registry and the platform are created before
    any code of the worker is imported.
    """
    enter("plugins")
    config = ExecutorConfig.model_validate_json(spec.config)
    plugins = PluginRegistry(policy=PluginPolicy.of(config.plugins), options=config.plugin_options)
    platform = choose_platform(plugins, spec.platform)
    enter("worker_cls")
    context = ExecutorContext(
        config=config,
        platform=platform,
        plugins=plugins,
        worker_cls=plugins.load("worker", spec.worker),
        worker_options=spec.worker_options,
    )
    worker = construct_worker(
        context, rank=spec.rank, local_rank=spec.local_rank, rendezvous=spec.rendezvous
    )
    return worker, plugins


def describe_plugins(plugins: PluginRegistry) -> bytes:
    """Return, as bytes, every plugin that this process has loaded.

    Options are sent as their representations, which is enough to compare them.
    """
    return encode([_pack_resolution(resolution) for resolution in plugins.resolutions])


def check_plugins(engine: PluginLookup, per_rank: Sequence[bytes]) -> None:
    """Raise PluginError, with every difference, if processes have loaded different plugins.

    per_rank: what `describe_plugins` returned in each worker's process.
    """
    per_worker = [_unpack_resolutions(content) for content in per_rank]
    problems = compare_resolutions(per_worker)
    for own in engine.resolutions:
        for other in per_worker[0]:
            same = (own.kind, own.target) == (other.kind, other.target)
            options = {name: repr(value) for name, value in own.options.items()}
            if same and (own.version, options) != (other.version, other.options):
                problems.append(f"The engine has {own}; the workers have {other}.")
    if problems:
        raise PluginError(
            "The workers have loaded other plugins than the engine:"
            + "".join(f"\n  - {p}" for p in problems)
        )


def _pack_resolution(resolution: Resolution) -> dict[str, Any]:
    shown = {name: repr(value) for name, value in resolution.options.items()}
    return {field.name: getattr(resolution, field.name) for field in fields(resolution)} | {
        "options": shown
    }


def _unpack_resolutions(content: bytes) -> list[Resolution]:
    packed = decode(content, list[dict[str, Any]])
    try:
        return [_unpack_resolution(item) for item in packed]
    except TypeError as error:
        raise MessageError(f"A worker sent an invalid list of its plugins: {error}") from None


def _unpack_resolution(packed: Mapping[str, Any]) -> Resolution:
    """Return a resolution, with lists converted back to tuples."""
    lists = {name: tuple(packed.get(name, ())) for name in ("notes", "roles")}
    options = {"options": freeze(packed.get("options", {}))}
    return Resolution(**(dict(packed) | lists | options))


def _reference(plugins: PluginLookup, kind: str, cls: type) -> str:
    """Return a reference by which another process can import a plugin class loaded here."""
    resolution = plugins.resolution_of(kind, cls)
    if resolution is not None and resolution.distribution:
        return f"{resolution.name}@{resolution.distribution}"
    target = f"{cls.__module__}:{cls.__qualname__}" if resolution is None else resolution.target
    if "<locals>" in target or target.startswith("__main__:"):
        raise ContractError(
            f"The {kind} {target} cannot be imported by another process; define the class at "
            "the top level of an importable module."
        )
    return target
