"""One run of the demo: an engine with some parts, its answers, and who filled each place, why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dovetail.cli.demo_questions import Subject
from dovetail.clock import MonotonicClock
from dovetail.entrypoints.llm import LLM

if TYPE_CHECKING:
    from dovetail.config import EngineConfig
    from dovetail.config.engine_config import Change
    from dovetail.outputs import RequestOutput
    from dovetail.plugins import Resolution

PLUGIN_FIELDS = {
    "platform": "parallel.platform",
    "executor": "parallel.executor_backend",
    "worker": "parallel.worker_cls",
    "scheduler": "scheduler.scheduler_cls",
    "policy": "scheduler.scheduler_cls",
    "attention": "compute.attention_backend",
    "linear_method": "compute.linear_method",
    "ops": "compute.ops",
    "weight_loader": "load.load_format",
    "tokenizer": "model.tokenizer_mode",
}
"""The config field that says who fills a place, by kind of plugin."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Who filled a place, and why."""

    resolution: Resolution
    reason: str


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    """What one engine did. parts: by kind. changes: what was set for the user. Time in seconds."""

    outputs: tuple[RequestOutput, ...]
    total_s: float
    parts: Mapping[str, Part]
    changes: tuple[Change, ...]

    @property
    def texts(self) -> list[str]:
        """The answers."""
        return [output.outputs[0].text.strip() for output in self.outputs]

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(output.outputs[0].token_ids) for output in self.outputs)

    def num_equal(self, other: DemoRun) -> int:
        """Return how many answers are the same in both runs, token by token."""
        pairs = zip(self.outputs, other.outputs, strict=True)
        return sum(
            ours.outputs[0].token_ids == theirs.outputs[0].token_ids for ours, theirs in pairs
        )


def run_demo(
    subject: Subject, picks: Mapping[str, str], *, trust_local_code: bool = False
) -> DemoRun:
    """Ask all questions at once, greedily, of an engine with the options `picks`; shut it down."""
    clock = MonotonicClock()
    texts = [question.text for question in subject.questions]
    with LLM(subject.model, trust_local_code=trust_local_code, **picks) as llm:
        params = replace(
            llm.get_default_sampling_params(), temperature=0.0, max_tokens=subject.max_tokens
        )
        start_ns = clock.now_ns()
        if subject.as_chat:
            outputs = llm.chat([[{"role": "user", "content": text}] for text in texts], params)
        else:
            outputs = llm.generate(texts, params)
        total_s = (clock.now_ns() - start_ns) / 1e9
        engine = llm.llm_engine
        parts = {
            found.kind: Part(resolution=found, reason=_reason(found, engine.config, set(picks)))
            for found in engine.plugins.chosen
        }
        return DemoRun(
            outputs=tuple(outputs),
            total_s=total_s,
            parts=parts,
            changes=tuple(engine.config.explain()),
        )


def _reason(found: Resolution, config: EngineConfig, picked: set[str]) -> str:
    """Return why a plugin fills its place: asked for, set with a reason, or preferred."""
    if found.kind == "model":
        return "config.json names it"
    field = PLUGIN_FIELDS.get(found.kind, "")
    if field.rpartition(".")[2] in picked:
        return "asked for"
    for change in config.explain():
        if change.field == field:
            return change.reason
    if found.kind == "platform":
        return "the best for this machine"
    return "the default" if found.kind == "tokenizer" else "the platform prefers it"
