"""The header of a decision log: everything that is needed to construct the same scheduler."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from dovetail.clock import Clock
from dovetail.errors import UserError
from dovetail.interfaces import kv_cache as specs
from dovetail.interfaces.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec
from dovetail.interfaces.policy import Policy
from dovetail.interfaces.scheduler import SchedulerContext, SchedulerInterface, SchedulerLimits
from dovetail.plugins.loading import LOCAL_PREFIX


@dataclass(frozen=True, kw_only=True)
class LogHeader:
    """The description of a scheduler in a log.

    scheduler, policy: references to classes, made by `reference`; policy is "" if there is none.
    """

    scheduler: str
    policy: str
    limits: SchedulerLimits
    kv_cache: KVCacheConfig
    seed: int
    strict: bool
    options: Mapping[str, Any]
    policy_options: Mapping[str, Any]

    @classmethod
    def of(cls, scheduler_cls: type[SchedulerInterface], context: SchedulerContext) -> LogHeader:
        """Describe a scheduler before it is constructed."""
        return cls(
            scheduler=reference(scheduler_cls),
            policy="" if context.policy is None else reference(context.policy),
            limits=context.limits,
            kv_cache=context.kv_cache,
            seed=context.seed,
            strict=context.strict,
            options=dict(context.options),
            policy_options=dict(context.policy_options),
        )

    def with_options(
        self, options: Mapping[str, Any], policy_options: Mapping[str, Any]
    ) -> LogHeader:
        """Return the header for another scheduler with the same limits."""
        return replace(self, options=options, policy_options=policy_options)

    def context(self, *, policy: type[Policy] | None, clock: Clock) -> SchedulerContext:
        """Return the context for a scheduler with this header."""
        return SchedulerContext(
            limits=self.limits,
            kv_cache=self.kv_cache,
            clock=clock,
            policy=policy,
            seed=self.seed,
            strict=self.strict,
            options=self.options,
            policy_options=self.policy_options,
        )

    def encode(self) -> bytes:
        """Return the header as JSON."""
        record = asdict(self)
        record["kv_cache"]["groups"] = [
            {
                "layer_names": group.layer_names,
                "layers_per_page": group.layers_per_page,
                "spec": {"kind": type(group.spec).__name__, **asdict(group.spec)},
            }
            for group in self.kv_cache.groups
        ]
        return json.dumps(record).encode()

    @classmethod
    def decode(cls, payload: bytes) -> LogHeader:
        """Return the header of a HEADER record. Raise UserError if this version cannot read it."""
        try:
            record = json.loads(payload)
            cache = record["kv_cache"]
            cache["groups"] = tuple(
                KVCacheGroup(
                    layer_names=tuple(group["layer_names"]),
                    spec=_make_spec(group["spec"]),
                    layers_per_page=group.get("layers_per_page", 1),
                )
                for group in cache["groups"]
            )
            record["kv_cache"] = KVCacheConfig(**cache)
            record["limits"] = SchedulerLimits(**record["limits"])
            return cls(**record)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"the log's header cannot be read by this version: {error}") from error


def reference(cls: type) -> str:
    """Return a reference that another process can load: "pkg.mod:Class" or "/file.py:Class".

    The second form is for a class that was loaded from a file.
    """
    module = cls.__module__
    if module.startswith(LOCAL_PREFIX):
        module = getattr(sys.modules.get(module), "__file__", None) or module
    return f"{module}:{cls.__qualname__}"


def _make_spec(record: dict[str, Any]) -> KVCacheSpec:
    kinds: tuple[type[KVCacheSpec], ...] = (
        specs.FullAttentionSpec,
        specs.LatentAttentionSpec,
        specs.StateSpec,
        specs.NoCacheSpec,
    )
    kind = {item.__name__: item for item in kinds}[record.pop("kind")]
    return kind(**record)
