"""The description of a workload in an experiment file: which requests, when, and with which SLOs.

All values are checked when the description is created. Times are in seconds, shares are relative
weights.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MAX_SIGMA = 10.0
"""The largest SIGMA of `expected_tokens`."""

Weight = Annotated[float, Field(ge=1e-9, le=1e9)]
Seconds = Annotated[float, Field(ge=0, le=1e6)]
PositiveSeconds = Annotated[float, Field(ge=1e-3, le=1e6)]
Milliseconds = Annotated[float, Field(ge=0, le=1e9)]
Variation = Annotated[float, Field(ge=0, le=100)]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]
MAX_TOKENS = 10_000_000
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ArrivalSpec(_Model):
    """The arrival process of a workload.

    process: "trace" (the times of the trace), "poisson", "gamma" (bursts), "on_off", "diurnal" or
    "burst" (all at the start). burstiness: shape of the gamma distribution; 1 is Poisson, smaller
    values are more bursty. on_s, off_s: mean durations. period_s, amplitude: parameters of the
    sine; amplitude is 0 to 1.
    """

    process: Literal["", "trace", "poisson", "gamma", "on_off", "diurnal", "burst"] = ""
    burstiness: Annotated[float, Field(ge=1e-3, le=1e3)] = 0.25
    on_s: PositiveSeconds = 10.0
    off_s: Seconds = 10.0
    period_s: PositiveSeconds = 600.0
    amplitude: Annotated[float, Field(ge=0, le=1)] = 0.8


class Component(_Model):
    """One kind of request in a mixed workload.

    share: relative frequency. prompt_tokens, output_tokens: mean lengths; *_cv: standard deviation
    divided by the mean, of a log-normal distribution. prefix_groups, prefix_tokens: number of
    prefixes that requests share, and their length, rounded down to blocks of 512 tokens.
    """

    name: str
    share: Weight = 1.0
    prompt_tokens: Tokens = 1024
    prompt_cv: Variation = 1.0
    output_tokens: Tokens = 200
    output_cv: Variation = 1.0
    tenant: str = ""
    priority: Priority = 0
    prefix_groups: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    prefix_tokens: Annotated[int, Field(ge=0, le=10_000_000)] = 0


class SessionSpec(_Model):
    """Conversations or agents: the next request arrives after the previous one has ended.

    turns: mean number of requests per session, geometrically distributed. think_s: mean think time
    between the end of a request and the next request. think_cv: coefficient of variation of the
    think time.
    first_tokens: mean length of the first prompt. message_tokens: mean number of tokens that each
    further turn adds to the conversation. reply_tokens: mean length of an output.
    system_tokens: length of the prefix that all sessions share, rounded down to 512.
    """

    turns: Annotated[float, Field(ge=1, le=10_000)] = 4.0
    think_s: Seconds = 10.0
    think_cv: Variation = 1.0
    first_tokens: Tokens = 512
    message_tokens: Tokens = 100
    reply_tokens: Tokens = 200
    system_tokens: Annotated[int, Field(ge=0, le=10_000_000)] = 0


class SLOClass(_Model):
    """A class of requests with objectives; 0 for none.

    share: relative frequency of the class. ttft_ms: time to the first token. tpot_ms: time per
    further token.
    """

    name: str = "default"
    share: Weight = 1.0
    ttft_ms: Milliseconds = 0.0
    tpot_ms: Milliseconds = 0.0
    priority: Priority = 0


class WorkloadSpec(_Model):
    """A workload. Exactly one of `trace`, `synthetic`, `mix` and `sessions` is set.

    trace: "azure:conv", "mooncake:synthetic", … or a path; synthetic: a name of
    `dovetail_lab.workloads.presets.PRESETS`. num_requests: requests per run. first_row: row of the
    trace at which the first seed begins. tokenizer: a model directory, for traces with texts.
    tenants: number of tenants to which requests are assigned; 0 keeps those of the trace.
    tenant_skew: exponent of a Zipf distribution of the tenants; 0 for equal shares.
    expected_tokens: "none", "exact", or "noisy:SIGMA": the estimates that clients declare.
    max_tokens: the limit that every client sends; 0 for the next power of two above all outputs.
    too_long: "clip" or "drop" requests that exceed the engine's maximum length.
    """

    trace: str = ""
    synthetic: str = ""
    mix: tuple[Component, ...] = ()
    sessions: SessionSpec | None = None
    num_requests: Annotated[int, Field(ge=1, le=100_000_000)] = 1000
    first_row: Annotated[int, Field(ge=0, le=10**12)] = 0
    tokenizer: str = ""
    arrivals: ArrivalSpec = ArrivalSpec()
    tenants: Annotated[int, Field(ge=0, le=100_000)] = 0
    tenant_skew: Annotated[float, Field(ge=0, le=10)] = 0.0
    slo_classes: tuple[SLOClass, ...] = ()
    expected_tokens: str = "none"
    max_tokens: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    too_long: Literal["clip", "drop"] = "clip"

    @field_validator("expected_tokens")
    @classmethod
    def _check_estimates(cls, value: str) -> str:
        kind, _, sigma = value.partition(":")
        try:
            valid = value in ("none", "exact") or (
                kind == "noisy" and 0 <= float(sigma) <= MAX_SIGMA
            )
        except ValueError:
            valid = False
        if not valid:
            raise ValueError(
                f"{value[:40]!r} is not none, exact or noisy:SIGMA "
                f"with a SIGMA from 0 to {MAX_SIGMA:g}"
            )
        return value

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        sources = {
            "trace": self.trace,
            "synthetic": self.synthetic,
            "mix": self.mix,
            "sessions": self.sessions,
        }
        named = [name for name, value in sources.items() if value]
        if len(named) != 1:
            shown = " and ".join(named) or "none"
            raise ValueError(f"set exactly one of {', '.join(sources)}; got {shown}")
        if self.arrivals.process == "trace" and not self.trace:
            raise ValueError('arrivals.process = "trace" needs a trace')
        names = [item.name for item in self.slo_classes]
        if len(set(names)) != len(names):
            raise ValueError("the names of slo_classes are not unique")
        return self
