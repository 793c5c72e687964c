"""Explains the plugin choices of a configuration, without creating an engine.

This module runs engine startup until the plugins are selected: options, registry, platform,
resolution. Opens no weights, and imports a tensor library only if a candidate plugin does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from dovetail.engine.attention_check import described_attention
from dovetail.engine.input.tokenizer_checks import load_tokenizer
from dovetail.engine.messages.parsers import choose_parser
from dovetail.engine.plugin_choices import make_registry, named_plugins
from dovetail.errors import (
    AttentionUnknownError,
    ConfigError,
    DovetailError,
    ModelError,
    PluginError,
)
from dovetail.interfaces.attention import AttentionFacts
from dovetail.interfaces.engine_config import EngineConfig
from dovetail.interfaces.platform import Platform
from dovetail.plugin_kinds import NO_PLUGIN, get_kind
from dovetail.plugins.attention_requirements import attention_requirements, read_attention_facts
from dovetail.plugins.capabilities import DESCRIBES_ATTENTION, declared_ids
from dovetail.plugins.selection import (
    AUTO,
    UNKNOWN,
    USABLE,
    Criteria,
    Explanation,
    choose,
    choose_platform,
    explain,
)

if TYPE_CHECKING:
    from dovetail.config import EngineArgs, RequestedConfig
    from dovetail.engine.plugin_choices import AnyConfig
    from dovetail.plugins import PluginRegistry

_OF_MODEL = ("attention", "model")
_RESOLVED = ("linear_method", "grammar")
_BY_TEMPLATE = ("tool_parser", "reasoning_parser")
_NO_MODEL = "set --model to compare plugins with the requirements of a model"
_NO_HEADS = AttentionFacts(head_size=0, num_heads=0, num_kv_heads=0)
_PLAIN_CONFIG = {"architectures": ["NoModel"], "vocab_size": 1, "max_position_embeddings": 2048}


def explain_choice(
    kind: str, args: EngineArgs | None = None, *, assume: str = "", **options: object
) -> Explanation:
    """Return which plugin of `kind` an engine with `args` would use, and why.

    args: None to assume no specific model; `options` are then the `EngineArgs` other than the
    model. assume: a platform and an architecture, such as "cuda:sm_90", for which the choice is
    explained although this machine does not have that device. Raises
    PluginNotFoundError for an unknown kind, ConfigError or ModelError for an invalid configuration,
    PluginError if no platform can be used.
    """
    from dovetail.config import EngineArgs

    get_kind(kind)
    if args is not None:
        return _explain(kind, args.create_engine_config(), assume, has_model=True)
    with _plain_model() as folder:
        plain = EngineArgs.from_kwargs(model=folder, **options)
        return _explain(kind, plain.create_engine_config(), assume, has_model=False)


def criteria_of(kind: str, config: AnyConfig, platform: Platform | None = None) -> Criteria:
    """Return the criteria by which `config` selects plugins of a kind.

    platform: given only if `config` is resolved.
    """
    return Criteria(
        references=named_plugins(kind, config),
        why=_why(kind, config),
        platform=platform,
        dtype=config.model.dtype if platform is not None else "",
        batch_invariant=config.compute.batch_invariant and platform is not None,
    )


def _why(kind: str, config: AnyConfig) -> str:
    """Return why the configuration names these plugins of a kind."""
    row, named = get_kind(kind), named_plugins(kind, config)
    path = row.field
    if not path:
        return (
            "the option model selects plugins of this kind"
            if row.roles
            else "no part of the engine uses plugins of this kind yet"
        )
    if kind == "model":
        return "config.json names its architecture"
    if kind == "tokenizer" and config.model.skip_tokenizer_init:
        return "skip_tokenizer_init is set"
    field = path.partition(".")[2]
    changes = config.changes if isinstance(config, EngineConfig) else ()
    reasons = {change.field: change.reason for change in changes}
    if path in reasons:
        return f"{field}: {reasons[path]}"
    if named == (AUTO,):
        return f'{field} is "auto"'
    return f"{field} names it" if named else f"{field} is empty"


def _explain(kind: str, requested: RequestedConfig, assume: str, *, has_model: bool) -> Explanation:
    if kind == "platform":
        if assume:
            raise ConfigError(
                f"assume={assume!r} already names the platform; omit it, or explain another kind."
            )
        return _explain_platform(requested)
    from dovetail.config.resolve import resolve, selects_grammar_backend

    registry = make_registry(requested)
    platform = (
        _assumed_platform(registry, assume)
        if assume
        else choose_platform(registry, requested.parallel.platform)
    )
    is_open = requested.model.dtype == AUTO
    config = resolve(requested, platform, registry if kind in _RESOLVED else None)
    criteria = criteria_of(kind, config, platform)
    if not has_model and is_open:
        criteria = replace(criteria, dtype="")
    elif kind == "attention":
        without_heads = attention_requirements(
            _NO_HEADS, config.worker_config(), platform.info.device_type, platform.assumed
        )
        criteria = replace(criteria, config_requirements=without_heads)
    if kind in _OF_MODEL and not has_model:
        references = () if kind == "model" else criteria.references
        return explain(registry, kind, replace(criteria, references=references, why=_NO_MODEL))
    if kind == "attention":
        return _explain_attention(registry, config, platform, criteria)
    if kind in _BY_TEMPLATE and not criteria.references:
        criteria = _criteria_of_parser(criteria, kind, config, registry, has_model=has_model)
    if kind == "grammar" and selects_grammar_backend(requested):
        # An engine without a grammar plugin starts, so it is not an error that none qualifies.
        explanation = explain(registry, kind, replace(criteria, references=(AUTO,)))
        return replace(explanation, error="") if not explanation.chosen else explanation
    return explain(registry, kind, criteria)


def _criteria_of_parser(
    criteria: Criteria, kind: str, config: EngineConfig, plugins: PluginRegistry, *, has_model: bool
) -> Criteria:
    """Return the criteria of a parser that is selected by the model's chat template."""
    if getattr(config.extensions, kind) == NO_PLUGIN:
        return replace(criteria, why=f'{kind} is "{NO_PLUGIN}"')
    if not has_model:
        return replace(criteria, why="set --model: the model's chat template selects the parser")
    try:
        tokenizer = load_tokenizer(config, plugins)
    except ModelError as error:
        return replace(criteria, why=f"the model has no usable tokenizer: {error}".rstrip("."))
    parser = choose_parser(kind, config, plugins, tokenizer)
    if parser is None:
        return replace(criteria, why="the model has no chat template of a known format")
    return replace(criteria, references=(parser.name,), why=parser.why)


def _explain_attention(
    registry: PluginRegistry, config: EngineConfig, platform: Platform, criteria: Criteria
) -> Explanation:
    """Explain the backend choice for the model's requirements, as the worker reports them."""
    attention, problem, unknown = read_attention_facts(config.model.hf_config), "", ""
    try:
        worker_cls = choose(registry, platform, "worker", config.parallel.worker_cls or AUTO)
        if DESCRIBES_ATTENTION in declared_ids(worker_cls, "provides"):
            attention = described_attention(worker_cls, registry, config, platform)
            if attention is None:
                criteria = replace(criteria, references=(), why="the model has no attention layers")
    except AttentionUnknownError as error:
        attention, unknown = None, str(error)
    except DovetailError as error:
        problem = str(error)
    if attention is not None:
        required = attention_requirements(
            attention, config.worker_config(), platform.info.device_type, platform.assumed
        )
        criteria = replace(criteria, requirements=required)
    explanation = explain(registry, "attention", criteria)
    if unknown:
        return explanation.with_state(UNKNOWN, unknown)
    if not problem:
        return explanation
    text = f"An engine cannot create the worker and the model: {problem}"
    return replace(explanation.with_state(USABLE), error=text)


def _assumed_platform(registry: PluginRegistry, assume: str) -> Platform:
    """Return the platform of "platform:architecture" without looking for its device."""
    name, separator, architecture = assume.partition(":")
    if not (name and separator and architecture):
        raise ConfigError(
            f"assume={assume!r} must be a platform and an architecture, such as 'cuda:sm_90'."
        )
    platform: Platform = registry.load("platform", name).assume(architecture)
    registry.bind_platform(platform)
    return platform


def _explain_platform(config: RequestedConfig) -> Explanation:
    explanation = explain(make_registry(config), "platform", criteria_of("platform", config))
    if explanation.error:
        return explanation
    try:
        # Constructing the selected platform may fail, for example if a capability is missing.
        choose_platform(make_registry(config), config.parallel.platform)
    except PluginError as error:
        return replace(explanation, error=str(error))
    return explanation


@contextmanager
def _plain_model() -> Iterator[Path]:
    """Yield a directory with a minimal config.json, for kinds that do not depend on a model."""
    with TemporaryDirectory(prefix="dovetail-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_PLAIN_CONFIG), encoding="utf-8")
        yield Path(folder)
