"""The description of an experiment: one TOML or YAML file, or the flags of `lab compare`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dovetail.errors import UserError, nearest
from dovetail.interfaces import SchedulerLimits
from dovetail_lab.experiments.run_metrics import Cut
from dovetail_lab.simulation.setup import EngineSetup
from dovetail_lab.step_times.calibration import MeasuredEngine
from dovetail_lab.step_times.references import StepTimeReference
from dovetail_lab.workloads.presets import PRESETS
from dovetail_lab.workloads.spec import (
    ArrivalSpec,
    Component,
    SessionSpec,
    SLOClass,
    WorkloadSpec,
)

Share = Annotated[float, Field(ge=0, lt=0.5)]
Load = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
MAX_REPLICAS = 1024
MAX_LOADS = 1000


_SpecT = TypeVar("_SpecT", bound=BaseModel)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PolicySpec(_Model):
    """A policy of the experiment.

    policy: the reference of the policy: a name, "pkg.mod:Class" or "./file.py:Class". options: the
    options of the policy. router: the router of the replicas; "" for that of the setup. label: the
    name in reports; "" for the name of the policy or class.
    """

    policy: Annotated[str, Field(min_length=1)]
    options: dict[str, Any] = {}
    router: str = ""
    label: str = ""

    @property
    def name(self) -> str:
        """The label, or the name of the policy."""
        return self.label or self.policy.rpartition(":")[2]


class EngineSpec(_Model):
    """The engine of every run.

    step_times: the step-time model of the simulator, see `StepTimeReference`. model: the model of
    the real engine and of the step times; "" for the demo model. num_threads: CPU threads of the
    real engine; 0 for the platform's choice. num_blocks, block_size: the KV cache. depth: steps in
    flight. replicas: number of engines behind `router`, in the simulator. prefill_replicas: if not
    0, this number of the replicas only runs prefill and the others only decode;
    transfer_latency_ms, transfer_us_per_token: time to move a request's KV blocks between them.
    """

    step_times: str = "linear"
    model: str = ""
    num_threads: Annotated[int, Field(ge=0, le=4096)] = 0
    max_num_seqs: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=100_000_000)] = 2048
    max_model_len: Annotated[int, Field(ge=2, le=100_000_000)] = 16384
    num_blocks: Annotated[int, Field(ge=2, lt=2**31)] = 8192
    block_size: Annotated[int, Field(ge=1, le=65536)] = 16
    depth: Annotated[int, Field(ge=1, le=4)] = 1
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: Annotated[int, Field(ge=0, le=100_000_000)] = 0
    replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 1
    router: str = "least_load"
    prefill_replicas: Annotated[int, Field(ge=0)] = 0
    transfer_latency_ms: Milliseconds = 1.0
    transfer_us_per_token: Milliseconds = 2.6

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs}"
            )
        room = (self.num_blocks - 1) * self.block_size
        if room < self.max_model_len:
            raise ValueError(
                f"the KV cache holds {room} tokens; max_model_len={self.max_model_len} needs "
                f"num_blocks of at least {-(-self.max_model_len // self.block_size) + 1}"
            )
        if self.prefill_replicas >= self.replicas:
            raise ValueError(
                f"prefill_replicas={self.prefill_replicas} must be less than "
                f"replicas={self.replicas}"
            )
        if self.prefill_replicas and not self.enable_prefix_caching:
            raise ValueError("prefill_replicas needs enable_prefix_caching=true")
        return self

    @property
    def real_model(self) -> str:
        """The model of the real engine."""
        return self.model or "demo"

    @property
    def engine_options(self) -> dict[str, Any]:
        """Additional options of the real engine."""
        return {"num_threads": self.num_threads} if self.num_threads else {}

    @property
    def step_time_reference(self) -> StepTimeReference:
        """The step-time model of the simulator."""
        return StepTimeReference(name=self.step_times, model=self.model)

    @property
    def limits(self) -> MeasuredEngine:
        """The limits that a calibration must cover."""
        return MeasuredEngine(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
        )

    def setup(self, policy: PolicySpec, seed: int, *, trust_local_code: bool) -> EngineSetup:
        """Return the engine for a policy and a seed."""
        limits = SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            enable_chunked_prefill=self.enable_chunked_prefill,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            enable_prefix_caching=self.enable_prefix_caching,
        )
        return EngineSetup(
            scheduler=policy.policy,
            limits=limits,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            depth=self.depth,
            seed=seed,
            policy_options=policy.options,
            trust_local_code=trust_local_code,
        )


class ExperimentSpec(_Model):
    """A comparison of policies on the same workloads.

    policies: the first one is the baseline of all differences, and its burst runs measure the
    capacity. loads: mean rates of arrival as fractions of the capacity. seeds: number of workloads
    per load; every policy runs all of them. first_seed: the lowest seed. engine: "sim",
    "real" or "both". warmup, drain, min_p99: see `Cut`. confidence: the level of all intervals.
    time_limit_s: wall time of one run.
    """

    name: str = "experiment"
    policies: Annotated[tuple[PolicySpec, ...], Field(min_length=1)]
    workload: WorkloadSpec
    loads: Annotated[tuple[Load, ...], Field(min_length=1, max_length=MAX_LOADS)] = (0.5, 0.7, 0.9)
    seeds: Annotated[int, Field(ge=1, le=10_000)] = 10
    first_seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    engine: Literal["sim", "real", "both"] = "sim"
    setup: EngineSpec = EngineSpec()
    warmup: Share = 0.1
    drain: Share = 0.1
    min_p99: Annotated[int, Field(ge=100, le=100_000_000)] = 1000
    confidence: Annotated[float, Field(gt=0.5, le=0.9999)] = 0.95
    time_limit_s: Annotated[float, Field(gt=0, le=1e9)] = 600.0

    @field_validator("policies", mode="before")
    @classmethod
    def _read_names(cls, value: object) -> object:
        if isinstance(value, list | tuple):
            return [{"policy": item} if isinstance(item, str) else item for item in value]
        return value

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [policy.name for policy in self.policies]
        duplicates = sorted({name for name in names if names.count(name) > 1})
        if duplicates:
            raise ValueError(f"two policies are named {duplicates[0]!r}; give them labels")
        if self.setup.replicas > 1 and self.engine != "sim":
            raise ValueError(
                f"engine={self.engine!r} supports one engine only; replicas need engine='sim'"
            )
        if len(set(self.loads)) != len(self.loads):
            raise ValueError("the loads are not unique")
        return self

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines that run: "sim", "real" or both."""
        return ("sim", "real") if self.engine == "both" else (self.engine,)

    @property
    def cut(self) -> Cut:
        """Which requests of a run are measured."""
        return Cut(warmup=self.warmup, drain=self.drain, min_p99=self.min_p99)

    def policy(self, name: str) -> PolicySpec:
        """Return the policy with a name."""
        return next(policy for policy in self.policies if policy.name == name)


_MODELS: Mapping[str, type[BaseModel]] = {
    "policies": PolicySpec,
    "setup": EngineSpec,
    "workload": WorkloadSpec,
    "arrivals": ArrivalSpec,
    "mix": Component,
    "sessions": SessionSpec,
    "slo_classes": SLOClass,
}
"""Maps the name of a table of an experiment file to its model."""
_TYPE_REASONS: Mapping[str, str] = {
    "tuple_type": "must be a list",
    "model_type": "must be a table of fields",
    "dict_type": "must be a table of fields",
}
"""Maps the type of a pydantic error to a message for the user."""


def make_spec(fields: Mapping[str, Any]) -> ExperimentSpec:
    """Return a validated experiment. Raise UserError that names every invalid field."""
    return _checked(ExperimentSpec, fields, "experiment")


def make_engine_spec(fields: Mapping[str, Any]) -> EngineSpec:
    """Return a validated engine. Raise UserError that names every invalid field."""
    return _checked(EngineSpec, fields, "engine")


def _checked(kind: type[_SpecT], fields: Mapping[str, Any], name: str) -> _SpecT:
    try:
        return kind.model_validate(dict(fields))
    except ValidationError as error:
        items = error.errors()
        # An invalid item of a list also makes pydantic report that the list is too short.
        parents = {item["loc"][:length] for item in items for length in range(len(item["loc"]))}
        shown = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or name}: {_reason(item, kind)}"
            for item in [item for item in items if item["loc"] not in parents][:3]
        )
        end = "" if shown.endswith("?") else "."
        raise UserError(f"the {name} is invalid: {shown}{end}") from error


def _reason(item: Mapping[str, Any], kind: type[BaseModel]) -> str:
    """Return what is wrong with a field, and what to write instead."""
    if item["type"] == "extra_forbidden":
        tables = [name for name in item["loc"][:-1] if isinstance(name, str)]
        known = _MODELS.get(tables[-1], kind) if tables else kind
        hint = nearest(str(item["loc"][-1]), known.model_fields)
        return f"unknown field{'.' + hint if hint else '; use ' + ', '.join(known.model_fields)}"
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    return _TYPE_REASONS.get(item["type"], item["msg"])


def parse_loads(text: str) -> tuple[float, ...]:
    """Return loads from "0.5,0.9", or from "0.5:1.1:7": seven loads, evenly spaced."""
    try:
        if ":" not in text:
            return tuple(float(part) for part in text.split(","))
        parts = text.split(":")
        low, high, count = float(parts[0]), float(parts[1]), int(parts[2])
        if not 2 <= count <= MAX_LOADS or len(parts) != 3:
            raise ValueError
        return tuple(round(low + (high - low) * i / (count - 1), 6) for i in range(count))
    except (ValueError, IndexError) as error:
        raise UserError(
            f"load={text!r} is neither a list such as 0.5,0.9 nor FROM:TO:COUNT such as 0.5:1.1:7."
        ) from error


def workload_fields(trace: str) -> dict[str, Any]:
    """Convert the value of --trace, a trace or a preset's name, to fields of a workload."""
    return {"synthetic": trace} if trace in PRESETS else {"trace": trace}
