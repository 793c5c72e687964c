"""Named synthetic workloads: plain chat, conversations, agents, and adversarial mixes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail_lab.workloads.spec import ArrivalSpec, Component, SessionSpec, WorkloadSpec

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "chat": {"mix": (Component(name="chat"),)},
    "bursts": {
        "mix": (Component(name="chat"),),
        "arrivals": ArrivalSpec(process="gamma", burstiness=0.1),
    },
    "conversations": {"sessions": SessionSpec()},
    "agents": {
        "sessions": SessionSpec(
            turns=12,
            think_s=1.5,
            think_cv=2.0,
            first_tokens=3072,
            message_tokens=600,
            reply_tokens=80,
            system_tokens=2048,
        )
    },
    "long_and_short": {
        "mix": (
            Component(name="short", share=0.9, prompt_tokens=200, output_tokens=50),
            Component(name="long", share=0.1, prompt_tokens=6000, output_tokens=500),
        )
    },
    "long_outputs": {
        "mix": (
            Component(name="short", share=0.8, prompt_tokens=100, output_tokens=40),
            Component(name="long", share=0.2, prompt_tokens=100, output_tokens=1500, output_cv=0.5),
        )
    },
    "greedy_tenant": {
        "mix": (
            Component(name="greedy", share=0.85, tenant="greedy", output_tokens=300),
            Component(name="modest", share=0.15, tenant="modest", prompt_tokens=300),
        )
    },
    "returning_tenant": {
        "mix": (
            Component(name="steady", share=0.7, tenant="steady"),
            Component(name="returning", share=0.3, tenant="returning"),
        ),
        "arrivals": ArrivalSpec(process="on_off", on_s=20, off_s=40),
    },
    "hot_prefix": {
        "mix": (
            Component(
                name="hot", share=0.8, prompt_tokens=3000, prefix_groups=2, prefix_tokens=2560
            ),
            Component(name="cold", share=0.2, prompt_tokens=1500),
        )
    },
    "cache_pressure": {
        "mix": (Component(name="growing", prompt_tokens=64, output_tokens=1200, output_cv=0.3),)
    },
}
"""Maps a name to fields of `WorkloadSpec`. The mixes from "long_and_short" on are adversarial: each
is bad for some policy (long prompts before short ones, a greedy tenant, a hot prefix, …)."""


def with_preset(spec: WorkloadSpec) -> WorkloadSpec:
    """Return the description with its preset's fields; raise ValueError if the name is unknown."""
    if not spec.synthetic:
        return spec
    if spec.synthetic not in PRESETS:
        raise ValueError(f"synthetic={spec.synthetic!r} is not one of {', '.join(PRESETS)}")
    fields = dict(PRESETS[spec.synthetic])
    if spec.arrivals.process:
        fields.pop("arrivals", None)
    return spec.model_copy(update={"synthetic": "", **fields})
