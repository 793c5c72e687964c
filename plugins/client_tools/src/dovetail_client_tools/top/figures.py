"""The values that `dovetail top` shows, as JSON and as one line of text."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dovetail_client_tools.engine_steps.reader import one_line
from dovetail_client_tools.top.frame import NUM_LAST_STEPS, Picture, percent


def as_json(picture: Picture) -> dict[str, Any]:
    """Return the values that are shown. Unknown ones are None."""
    view, stats, rates = picture.view, picture.view.stats, picture.view.rates()
    requests = [asdict(row) | {"tokens_per_s": row.output_rate or None} for row in view.running()]
    steps = list(view.steps)[-NUM_LAST_STEPS:]
    known = stats is not None
    return {
        "url": picture.names.url,
        "model": picture.names.model,
        "policy": one_line(stats.policy) if stats else None,
        "problem": picture.problem or None,
        "num_running": stats.num_running if stats else None,
        "num_waiting": stats.num_waiting if stats else None,
        "new_tokens_per_s": rates.new_tokens if rates else None,
        "computed_tokens_per_s": rates.computed_tokens if rates else None,
        "steps_per_s": rates.steps if rates else None,
        "num_blocks": stats.num_blocks if stats else None,
        "num_used_blocks": stats.num_used_blocks if stats else None,
        "prefix_hits": stats.prefix_hits if stats else None,
        "prefix_queries": stats.prefix_queries if stats else None,
        "num_preemptions": stats.num_preemptions if stats else None,
        "policy_failures": stats.policy_failures if stats else None,
        "num_restarts": view.num_restarts,
        "steps": [
            {
                "step_id": step.step_id,
                "duration_ms": step.duration_ns / 1e6,
                "num_prefill_tokens": step.num_prefill_tokens,
                "num_decodes": len(step.decodes or ()) + len(step.verified),
                "num_joined": len(step.joined),
                "num_preempted": len(step.preempted),
                "num_ended": len(step.ended),
            }
            for step in steps
        ],
        "requests": requests if known else [],
    }


def as_line(picture: Picture) -> str:
    """Return the most important values as one line."""
    stats, rates = picture.view.stats, picture.view.rates()
    parts = [picture.time] if picture.time else []
    if picture.problem:
        return "  ".join([*parts, one_line(picture.problem, 400)])
    if stats is None:
        return "  ".join([*parts, "The engine has executed no step yet."])
    parts.append(f"running {stats.num_running:,}  waiting {stats.num_waiting:,}")
    if rates is not None:
        parts.append(f"new tokens/s {rates.new_tokens:,.1f}  steps/s {rates.steps:,.1f}")
    parts.append(f"KV cache {percent(stats.num_used_blocks, stats.num_blocks)}")
    parts.append(f"preemptions {stats.num_preemptions:,}")
    return "  ".join(parts)
