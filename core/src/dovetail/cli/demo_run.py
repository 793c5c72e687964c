"""One run of the demo: the engine and its plugins, its answers and its speed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from dovetail.cli.demo_questions import Subject
from dovetail.clock import MonotonicClock
from dovetail.entrypoints.llm import LLM
from dovetail.errors import RequestError
from dovetail.plugin_kinds import get_kind

if TYPE_CHECKING:
    from dovetail.config import EngineConfig
    from dovetail.interfaces.engine_config import Change
    from dovetail.outputs import RequestOutput
    from dovetail.plugins import Resolution

NUM_ROUNDS = 3
"""Number of timed rounds, after one warm-up round."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The plugin that was selected for a kind, and the reason."""

    resolution: Resolution
    reason: str


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    """The result of one engine.

    subject: the model and its questions. options: the options that differ from the default.
    total_s: median duration of a timed round, in seconds. parts: selected plugins by kind. changes:
    settings that the engine resolved.
    """

    subject: Subject
    options: Mapping[str, str]
    outputs: tuple[RequestOutput, ...]
    total_s: float
    parts: Mapping[str, Part]
    changes: tuple[Change, ...]

    @property
    def texts(self) -> list[str]:
        """The text of each answer."""
        return [output.outputs[0].text.strip() for output in self.outputs]

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all answers."""
        return sum(len(output.outputs[0].token_ids) for output in self.outputs)

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.num_tokens / self.total_s

    def changed_kinds(self, first: DemoRun) -> list[str]:
        """Return the kinds for which this run and `first` have different plugins."""
        kinds = (kind for kind in self.parts if kind in first.parts)
        return [
            kind
            for kind in kinds
            if self.parts[kind].resolution.name != first.parts[kind].resolution.name
        ]

    def num_equal(self, other: DemoRun) -> int:
        """Return how many answers have the same tokens in both runs."""
        pairs = zip(self.outputs, other.outputs, strict=True)
        return sum(
            actual.outputs[0].token_ids == expected.outputs[0].token_ids
            for actual, expected in pairs
        )


def run_demo(
    subject: Subject, options: Mapping[str, str], *, trust_local_code: bool = False
) -> DemoRun:
    """Answer all questions in one batch, in an engine with `options`, with greedy sampling.

    The first round is the warm-up and gives the answers. Then `NUM_ROUNDS` rounds are timed, each
    with an empty prefix cache.
    """
    with LLM(subject.model, trust_local_code=trust_local_code, **options) as llm:
        subject = _fit(subject, llm)
        outputs = _ask(llm, subject)
        seconds = [_time_round(llm, subject) for _ in range(NUM_ROUNDS)]
        engine = llm.llm_engine
        parts = {
            resolution.kind: Part(
                resolution=resolution, reason=_reason(resolution, engine.config, set(options))
            )
            for resolution in engine.plugins.chosen
        }
        return DemoRun(
            subject=subject,
            options=dict(options),
            outputs=tuple(outputs),
            total_s=median(seconds),
            parts=parts,
            changes=tuple(engine.config.explain()),
        )


def _fit(subject: Subject, llm: LLM) -> Subject:
    """Return `subject` with prompts instead of questions if the model has no chat template."""
    if not subject.prompts:
        return subject
    try:
        llm.get_tokenizer().apply_chat_template([{"role": "user", "content": "?"}])
    except RequestError:
        return replace(subject, questions=subject.prompts, as_chat=False, max_tokens=16)
    return subject


def _time_round(llm: LLM, subject: Subject) -> float:
    llm.reset_prefix_cache()
    clock = MonotonicClock()
    start_ns = clock.now_ns()
    _ask(llm, subject)
    return (clock.now_ns() - start_ns) / 1e9


def _ask(llm: LLM, subject: Subject) -> list[RequestOutput]:
    params = replace(
        llm.get_default_sampling_params(), temperature=0.0, max_tokens=subject.max_tokens
    )
    texts = [question.text for question in subject.questions]
    if subject.as_chat:
        return llm.chat([[{"role": "user", "content": text}] for text in texts], params)
    return llm.generate(texts, params)


def summary_of(resolution: Resolution) -> str:
    """Return the first line of the docstring of a plugin's class, or else the plugin's target.

    The class is not imported, because a plugin that ran in this process is already loaded.
    """
    module, _, name = resolution.target.partition(":")
    loaded = getattr(sys.modules.get(module), name, None)
    return (inspect.getdoc(loaded) or resolution.target).partition("\n")[0]


def _reason(resolution: Resolution, config: EngineConfig, requested: set[str]) -> str:
    """Return why a plugin was selected: by the user, a configuration rule or the platform."""
    if resolution.kind == "model":
        return "named in config.json"
    kind = get_kind(resolution.kind)
    field = kind.field
    if field.rpartition(".")[2] in requested:
        return "requested"
    for change in config.explain():
        if change.field == field:
            return change.reason
    if resolution.kind == "platform":
        return "the best for this machine"
    if kind.is_automatic:
        return "the chat template of the model" if kind.name != "grammar" else "it is installed"
    return "the default" if resolution.kind == "tokenizer" else "the platform prefers it"
