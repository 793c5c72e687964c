"""Resolves a requested configuration to the configuration of an engine, with reasons.

`resolve` calls one function per step. Later steps use the values of earlier ones.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from dovetail.config.checkpoint_facts import stated_dtype, stated_max_model_len
from dovetail.config.compile_level import resolve_compile_level
from dovetail.config.draft import Draft
from dovetail.config.quantized_checkpoints import choose_quantization_plugins
from dovetail.config.tensor_parallel import check_tensor_parallel
from dovetail.errors import (
    ConfigError,
    ContractError,
    ModelError,
    PluginNotFoundError,
    nearest,
)
from dovetail.interfaces.config_fields import AUTO, MODEL_DTYPES, ConfigNode
from dovetail.interfaces.engine_config import EngineConfig
from dovetail.interfaces.kv_cache import SCALE_BYTES
from dovetail.interfaces.platform import ConfigPatch, Platform
from dovetail.interfaces.requested_config import MAX_INT, RequestedConfig
from dovetail.plugin_kinds import NO_PLUGIN
from dovetail.plugins import PluginRegistry
from dovetail.plugins.construction import call_plugin
from dovetail.plugins.platform_results import check_problems, provided_capabilities
from dovetail.plugins.selection import Criteria, select
from dovetail.value_checks import shorten

DEFAULT_MAX_MODEL_LEN = 2048
DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
DEFAULT_DTYPE = "float32"
DEFAULT_TOKENIZER = "huggingface"

_DEFAULTS = {
    "cache.block_size": 16,
    "cache.gpu_memory_utilization": 0.9,
    "load.load_format": "safetensors",
    "model.tokenizer_mode": DEFAULT_TOKENIZER,
    "scheduler.scheduler_cls": "fcfs",
    "scheduler.async_scheduling": False,
}
GRAMMAR_FIELD = "extensions.grammar_backend"
_DTYPE = "model.dtype"
_LENGTH = "model.max_model_len"
_SEQS = "scheduler.max_num_seqs"
_BUDGET = "scheduler.max_num_batched_tokens"
_ASYNC = "scheduler.async_scheduling"
_DEPTH = "scheduler.pipeline_depth"
_CHUNKED = "scheduler.enable_chunked_prefill"

_SCALES = "cache.kv_cache_scales"
_SCALED_DTYPES = {"token": tuple(SCALE_BYTES), "layer": ("fp8_e4m3", "fp8_e5m2")}
"""The dtypes of a KV cache that each kind of scales supports, best kind first."""

_SUBSTITUTES = {
    "bfloat16": ("float32", "float16"),
    "float16": ("float32", "bfloat16"),
    "float32": ("bfloat16", "float16"),
}
"""Substitutes for an unsupported dtype: first dtypes that have all of its values, then its
range."""


def resolve(
    requested: RequestedConfig, platform: Platform, plugins: PluginRegistry | None = None
) -> EngineConfig:
    """Return the configuration of an engine on `platform`.

    `explain()` of the result lists the resolved values. An open field gets the platform's value,
    else the checkpoint's, else the default.
    plugins: the registry with linear methods for quantized checkpoints; None if no model is run.
    Raises ConfigError for values that the checkpoint or the platform does not support, ModelError
    for a quantized checkpoint that no plugin reads, and ContractError if a default of the platform
    has an unknown field or an invalid value.
    """
    draft = Draft(requested)
    _take_platform_values(draft, platform)
    _resolve_dtype(draft, platform)
    _resolve_max_model_len(draft)
    _limit_to_trained_length(draft)
    _resolve_step(draft)
    draft.fill("cache.kv_cache_dtype", draft.get(_DTYPE), "the cache has the dtype of the model")
    _resolve_kv_scales(draft)
    for path, value in requested.model.defaults.items():
        draft.fill(path, value, "the format of the model file")
    for path, value in _DEFAULTS.items():
        draft.fill(path, value, "the default")
    _resolve_pipeline(draft)
    draft.fill("parallel.platform", platform.info.name, "the best platform for this machine")
    resolve_compile_level(draft)
    _resolve_executor(draft)
    _check_with_platform(draft.finish(), platform)
    if plugins is not None:
        choose_quantization_plugins(draft, plugins, platform)
        _choose_grammar_backend(draft, plugins, platform)
    return draft.finish()


def selects_grammar_backend(requested: RequestedConfig) -> bool:
    """Return whether the grammar plugin is selected automatically.

    None is selected without a tokenizer, because a grammar needs its vocabulary, or with a decision
    log, which cannot record an admission gate.
    """
    if requested.extensions.grammar_backend is not None or requested.model.skip_tokenizer_init:
        return False
    return requested.observability.decision_log is None


def _choose_grammar_backend(draft: Draft, plugins: PluginRegistry, platform: Platform) -> None:
    """Select the first usable grammar plugin, unless the user named one. None is required."""
    if draft.requested.extensions.grammar_backend == NO_PLUGIN:
        draft.put(GRAMMAR_FIELD, None, f'grammar_backend is "{NO_PLUGIN}"')
    if not selects_grammar_backend(draft.requested):
        return
    with suppress(PluginNotFoundError):
        verdict = select(plugins, "grammar", Criteria(references=(AUTO,), platform=platform))
        draft.put(GRAMMAR_FIELD, verdict.reference, "the installed grammar plugin")


def request_of(config: EngineConfig) -> RequestedConfig:
    """Return a requested configuration that sets every option to its value in `config`."""
    values: dict[str, Any] = {}
    for name, field in RequestedConfig.model_fields.items():
        value = getattr(config, name)
        if isinstance(value, ConfigNode) and isinstance(field.annotation, type):
            values_set = {key: item for key, item in dict(value).items() if item is not None}
            value = field.annotation(**values_set)
        values[name] = value
    return RequestedConfig(**values)


def _check_with_platform(config: EngineConfig, platform: Platform) -> None:
    owner = f"platform {platform.info.name!r}"
    problem_list = call_plugin(owner, "problems", lambda: platform.problems(config))
    problems = check_problems(platform, problem_list)
    if problems:
        raise ConfigError(f"The {owner} cannot run this configuration: {' '.join(problems)}")


def _take_platform_values(draft: Draft, platform: Platform) -> None:
    name = platform.info.name
    owner = f"platform {name!r}"
    patch: object = call_plugin(owner, "defaults", lambda: platform.defaults(draft.requested))
    if not isinstance(patch, ConfigPatch):
        raise ContractError(
            f"The {owner} returned {shorten(patch)} for defaults; it must return a ConfigPatch."
        )
    for path, entry in patch.changes.items():
        if path not in draft.paths:
            raise ContractError(
                f"The {owner} sets a default for {path!r}, which is not a field that a platform "
                f"may set.{nearest(path, draft.paths)}"
            )
        value, reason = _read_entry(owner, path, entry)
        if path in draft.open:
            checked = _check_value(draft, path, value, owner)
            draft.put(path, checked, f"platform {name}: {reason}")


def _read_entry(owner: str, path: str, entry: object) -> tuple[object, str]:
    """Return the default's value and reason. Raise ContractError if one of them is missing."""
    if isinstance(entry, tuple) and len(entry) == 2:
        value, reason = entry
        if isinstance(reason, str) and reason.strip():
            return value, reason
    raise ContractError(
        f"The {owner} sets the default of {path} to {shorten(entry)}; it must be a tuple (value, "
        "reason), with a reason for the user."
    )


def _check_value(draft: Draft, path: str, value: object, owner: str) -> object:
    """Return the default's normalized value. Raise ContractError if it is invalid."""
    section_name, field = path.split(".")
    section = draft.section(section_name)
    other_fields = dict(section) if section_name == "model" else {}
    try:
        return getattr(type(section)(**{**other_fields, field: value}), field)
    except ConfigError as error:
        raise ContractError(f"The {owner} sets an invalid default: {error}") from None


def _resolve_dtype(draft: Draft, platform: Platform) -> None:
    declared = [
        c.removeprefix("dtype.") for c in provided_capabilities(platform) if c.startswith("dtype.")
    ]
    # A platform that declares no dtypes accepts any.
    usable = [name for name in MODEL_DTYPES if name in declared or not declared]
    requested = draft.get(_DTYPE)
    if requested != AUTO:
        if requested not in usable:
            raise ConfigError(
                f"dtype={requested!r}: the platform {platform.info.name!r} supports "
                f'{", ".join(sorted(declared))}; use one of these or dtype="auto".'
            )
        return
    hf_config = draft.requested.model.hf_config
    stated = stated_dtype(hf_config)
    if stated is not None and stated not in MODEL_DTYPES:
        raise ConfigError(
            f'dtype="auto": config.json has dtype {stated!r}, which is not one of '
            f"{', '.join(MODEL_DTYPES)}; set dtype to one of them."
        )
    name = stated or DEFAULT_DTYPE
    reason = f"config.json states {stated}" if stated else "config.json states no dtype"
    if name not in usable:
        lacking = f"the platform {platform.info.name} does not compute in {name}"
        name = next((other for other in _SUBSTITUTES[name] if other in usable), "")
        if not name:
            raise ConfigError(
                f'dtype="auto": {lacking}, but only in {", ".join(sorted(declared))}, and these '
                "dtypes are not supported; choose another platform."
            )
        reason = f"{reason}; {lacking}, so the most similar supported dtype is used"
    draft.put(_DTYPE, name, reason)


def _resolve_max_model_len(draft: Draft) -> None:
    stated = stated_max_model_len(draft.requested.model.hf_config)
    requested = draft.count(_LENGTH)
    if stated is None:
        reason = "config.json states no length; set max_model_len to change this default"
        draft.fill(_LENGTH, DEFAULT_MAX_MODEL_LEN, reason)
        return
    if requested is None or (requested > stated.maximum and _LENGTH in draft.open):
        if not 2 <= stated.tokens <= MAX_INT:
            raise ModelError(
                f"config.json: {stated.source} gives a maximum length of {stated.tokens:.6g} "
                f"tokens, which must be between 2 and {MAX_INT}. Correct the file, use "
                "hf_overrides, or set max_model_len."
            )
        draft.put(_LENGTH, stated.tokens, f"config.json: {stated.source}")
    elif requested > stated.maximum:
        advice = "Lower max_model_len."
        if stated.can_be_raised:
            raised = ", ".join(
                f'"{name}": {requested}'
                for name, tokens in stated.fields.items()
                if tokens < requested
            )
            advice += (
                " If the model supports longer sequences, raise its maximum length with "
                f"hf_overrides={{{raised}}}."
            )
        raise ConfigError(
            f"max_model_len={requested} is more than the model's maximum length of "
            f"{stated.maximum} tokens ({stated.source}). {advice}"
        )


def _limit_to_trained_length(draft: Draft) -> None:
    """Reduce an open max_model_len to the length for which an embedding model was trained."""
    trained = draft.requested.model.pooler.get("max_seq_length")
    if trained is not None and _LENGTH in draft.open and 2 <= trained < (draft.count(_LENGTH) or 0):
        draft.put(_LENGTH, trained, "sentence_bert_config.json: max_seq_length")


def _resolve_kv_scales(draft: Draft) -> None:
    """Resolve the scales of the KV cache. Called after its dtype is resolved."""
    dtype, requested = str(draft.get("cache.kv_cache_dtype")), draft.get(_SCALES)
    usable = [name for name, dtypes in _SCALED_DTYPES.items() if dtype in dtypes]
    if requested not in (None, *usable):
        allowed = " or ".join(map(repr, usable)) or "None"
        raise ConfigError(
            f"kv_cache_scales={requested!r} is not supported with kv_cache_dtype={dtype!r}; use "
            f"{allowed}."
        )
    if usable:
        draft.fill(_SCALES, usable[0], f"kv_cache_dtype is {dtype}")


def _resolve_pipeline(draft: Draft) -> None:
    """Resolve the pipeline depth and the size of the encoder cache.

    async_scheduling means depth 2, unless pipeline_depth is given.
    """
    depth = draft.count(_DEPTH)
    if _DEPTH not in draft.open and depth is not None:
        draft.put(_ASYNC, depth > 1, f"pipeline_depth is {depth}")
    else:
        depth = 2 if draft.get(_ASYNC) else 1
        draft.fill(_DEPTH, depth, f"async_scheduling is {draft.get(_ASYNC)}")
    encoder_tokens = draft.get("scheduler.max_num_encoder_tokens")
    draft.fill("scheduler.encoder_cache_tokens", encoder_tokens, "equal to max_num_encoder_tokens")


def _resolve_executor(draft: Draft) -> None:
    num_workers = draft.count("parallel.tensor_parallel_size") or 1
    check_tensor_parallel(num_workers, draft.requested.model.hf_config)
    if num_workers == 1:
        draft.fill("parallel.executor_backend", "uniproc", "one device needs only one process")
    else:
        reason = f"tensor_parallel_size={num_workers} needs a process for each worker"
        draft.fill("parallel.executor_backend", "multiproc", reason)


def _resolve_step(draft: Draft) -> None:
    """Resolve the limits of a step. Called after max_model_len is resolved."""
    if draft.requested.model.pooler.get("whole_prompts"):
        draft.put(_CHUNKED, False, "the model's attention is bidirectional")
    draft.fill(_CHUNKED, True, "the default")
    requested = None if _BUDGET in draft.open else draft.count(_BUDGET)
    seqs = draft.count(_SEQS) or DEFAULT_MAX_NUM_SEQS
    if _SEQS in draft.open and requested is not None and requested < seqs:
        reason = f"a step has at most max_num_batched_tokens={requested} tokens, one per request"
        draft.put(_SEQS, requested, reason)
        seqs = requested
    draft.fill(_SEQS, seqs, "the default")
    budget = draft.count(_BUDGET) or DEFAULT_MAX_NUM_BATCHED_TOKENS
    length = draft.count(_LENGTH) or 0
    if draft.get(_CHUNKED) or budget >= length:
        need, reason = seqs, f"each of max_num_seqs={seqs} requests needs a token in each step"
    elif requested is None:
        need, reason = max(seqs, length), "a prompt must fit in a step without chunked prefill"
    else:
        raise ConfigError(
            f"max_num_batched_tokens={shorten(requested)} is less than max_model_len={length}, but "
            "with enable_chunked_prefill=False a prompt must fit in one step; raise the former, "
            "lower the latter, or enable chunked prefill."
        )
    if budget < need and requested is None:
        draft.put(_BUDGET, need, reason)
    draft.fill(_BUDGET, budget, "the default")
