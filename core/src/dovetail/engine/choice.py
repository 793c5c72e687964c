"""What an engine of a configuration would choose, and why, without making the engine.

Goes the way of the start as far as the choosing of parts: options, registry, platform, resolution.
Opens no weights, and imports a tensor library only if a plugin that might be chosen does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dovetail.engine.plugin_choices import make_registry
from dovetail.errors import AttentionUnknownError, ContractError, DovetailError, PluginError
from dovetail.interfaces.attention import AttentionFacts
from dovetail.interfaces.engine_config import EngineConfig
from dovetail.interfaces.platform import Platform
from dovetail.interfaces.worker import WorkerContext
from dovetail.plugins.attention_requirements import attention_requirements, read_attention_facts
from dovetail.plugins.capabilities import DESCRIBES_ATTENTION, declared_ids
from dovetail.plugins.construction import call_plugin
from dovetail.plugins.explanation import (
    ABLE,
    TAKEN,
    UNKNOWN,
    Explanation,
    Wanted,
    explain,
)
from dovetail.plugins.kinds import get_kind
from dovetail.plugins.platform_answers import preferred_names
from dovetail.plugins.selection import AUTO, choose, choose_platform

if TYPE_CHECKING:
    from dovetail.config import EngineArgs, RequestedConfig
    from dovetail.plugins import PluginRegistry

_FIELDS = {
    "attention": "compute.attention_backend",
    "executor": "parallel.executor_backend",
    "grammar": "extensions.grammar_backend",
    "hooks": "extensions.hooks",
    "io_processor": "extensions.io_processor",
    "kv_connector": "extensions.kv_connector",
    "linear_method": "compute.linear_method",
    "logits_processor": "extensions.logits_processors",
    "model": "model.architecture",
    "ops": "compute.ops",
    "platform": "parallel.platform",
    "policy": "scheduler.scheduler_cls",
    "scheduler": "scheduler.scheduler_cls",
    "stat_logger": "extensions.stat_loggers",
    "step_extension": "extensions.step_extensions",
    "tokenizer": "model.tokenizer_mode",
    "weight_loader": "load.load_format",
    "worker": "parallel.worker_cls",
    "worker_extension": "extensions.worker_extension_cls",
}
"""The field of the configuration that names plugins of a kind."""

_OF_MODEL = ("attention", "model")
_CHOSEN_LATE = ("attention", "linear_method", "ops", "worker")
"""Kinds whose field is None where no plugin was requested: the first that fits is used."""
_NO_MODEL = "give --model to hold them against what a model asks"
_NO_HEADS = AttentionFacts(head_size=0, num_heads=0, num_kv_heads=0)
_PLAIN_CONFIG = {"architectures": ["NoModel"], "vocab_size": 1, "max_position_embeddings": 2048}


def explain_choice(kind: str, args: EngineArgs | None = None, **options: object) -> Explanation:
    """Return who would fill the place of a `kind` in an engine of `args`, and why.

    args: None for no model in particular, with `options` for the rest of `EngineArgs`. Raises
    PluginNotFoundError for an unknown kind, ConfigError and ModelError for the configuration,
    PluginError if there is no platform to choose anything for.
    """
    from dovetail.config import EngineArgs

    get_kind(kind)
    if args is not None:
        return _explain(kind, args.create_engine_config(), has_model=True)
    with _plain_model() as folder:
        plain = EngineArgs.from_kwargs(model=folder, **options)
        return _explain(kind, plain.create_engine_config(), has_model=False)


def wanted_of(
    kind: str, config: EngineConfig | RequestedConfig, platform: Platform | None = None
) -> Wanted:
    """Return what `config` wants of a kind. It is resolved, if there is a platform."""
    path = _FIELDS.get(kind)
    if path is None:
        return Wanted(references=(), why="no part of the engine takes plugins of this kind yet")
    group, field = path.split(".")
    value = getattr(getattr(config, group), field)
    if value is None and kind in _CHOSEN_LATE:
        value = AUTO
    changes = config.changes if isinstance(config, EngineConfig) else ()
    reasons = {change.field: change.reason for change in changes}
    why = f"{field}: {reasons[path]}" if path in reasons else f"{field} names it"
    if value in (AUTO, None, "", ()):
        why = f"{field} is {'left open' if value == AUTO else 'empty'}"
    if kind == "tokenizer" and config.model.skip_tokenizer_init:
        value, why = None, "skip_tokenizer_init is set"
    if kind == "model":
        why = "config.json names its architecture"
    references = value if isinstance(value, tuple) else () if value in (None, "") else (value,)
    if platform is None:
        return Wanted(references=references, why=why)
    return Wanted(
        references=references,
        why=why,
        platform=platform.info.name,
        device_type=platform.info.device_type,
        preferred=preferred_names(platform, kind),
        dtype=config.model.dtype,
        batch_invariant=config.compute.batch_invariant,
    )


def _explain(kind: str, requested: RequestedConfig, *, has_model: bool) -> Explanation:
    if kind == "platform":
        return _explain_platform(requested)
    from dovetail.config.resolve import resolve

    registry = make_registry(requested)
    platform = choose_platform(registry, requested.parallel.platform)
    is_open = requested.model.dtype == AUTO
    config = resolve(requested, platform, registry if kind == "linear_method" else None)
    wanted = wanted_of(kind, config, platform)
    if not has_model and is_open:
        wanted = replace(wanted, dtype="")
    elif kind == "attention":
        without_heads = attention_requirements(
            _NO_HEADS, config.worker_config(), platform.info.device_type
        )
        wanted = replace(wanted, config_requirements=without_heads)
    if kind in _OF_MODEL and not has_model:
        references = () if kind == "model" else wanted.references
        return explain(registry, kind, replace(wanted, references=references, why=_NO_MODEL))
    if kind == "attention":
        return _explain_attention(registry, config, platform, wanted)
    return explain(registry, kind, wanted)


def _explain_attention(
    registry: PluginRegistry, config: EngineConfig, platform: Platform, wanted: Wanted
) -> Explanation:
    """Explain who does what the model asks, which the worker says as it would when it loads it."""
    facts, problem, unknown = read_attention_facts(config.model.hf_config), "", ""
    try:
        worker_cls = choose(registry, platform, "worker", config.parallel.worker_cls or AUTO)
        if DESCRIBES_ATTENTION in declared_ids(worker_cls, "provides"):
            facts = _described(worker_cls, registry, config, platform)
            if facts is None:
                wanted = replace(wanted, references=(), why="the model has no attention layers")
    except AttentionUnknownError as error:
        facts, unknown = None, str(error)
    except DovetailError as error:
        problem = str(error)
    if facts is not None:
        wanted = replace(
            wanted,
            requirements=attention_requirements(
                facts, config.worker_config(), platform.info.device_type
            ),
        )
    explanation = explain(registry, "attention", wanted)
    if unknown:
        return _with_state(explanation, UNKNOWN, unknown)
    if not problem:
        return explanation
    text = f"An engine cannot make its worker and the model: {problem}"
    return replace(_with_state(explanation, ABLE), error=text)


def _described(
    worker_cls: type[Any], registry: PluginRegistry, config: EngineConfig, platform: Platform
) -> AttentionFacts | None:
    """Return what a worker says that the model asks; raise ContractError for anything else."""
    context = WorkerContext(
        config=config.worker_config(),
        platform=platform,
        plugins=registry,
        world_size=config.parallel.tensor_parallel_size,
        options=registry.options_of("worker", worker_cls),
    )
    whose = f"worker {worker_cls.__module__}:{worker_cls.__qualname__}"
    answer: object = call_plugin(whose, "attention", lambda: worker_cls.describe_attention(context))
    if answer is None or isinstance(answer, AttentionFacts):
        return answer
    raise ContractError(
        f"The {whose} returned {type(answer).__name__!r} for describe_attention; it has to return "
        "AttentionFacts, or None for a model without attention."
    )


def _with_state(explanation: Explanation, state: str, *reasons: str) -> Explanation:
    """Return `explanation` with nobody taken: who would be has `state` and further reasons."""
    verdicts = tuple(
        replace(one, state=state, reasons=(*one.reasons, *reasons)) if one.state == TAKEN else one
        for one in explanation.verdicts
    )
    return replace(explanation, verdicts=verdicts)


def _explain_platform(config: RequestedConfig) -> Explanation:
    wanted = wanted_of("platform", config)
    explanation = explain(make_registry(config), "platform", wanted)
    if explanation.error:
        return explanation
    try:
        # Who wins the choice has still to be made, and to provide what it needs itself.
        choose_platform(make_registry(config), config.parallel.platform)
    except PluginError as error:
        return replace(explanation, error=str(error))
    return explanation


@contextmanager
def _plain_model() -> Iterator[Path]:
    """Give a model directory that asks for nothing, for questions that no model matters to."""
    with TemporaryDirectory(prefix="dovetail-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_PLAIN_CONFIG), encoding="utf-8")
        yield Path(folder)
