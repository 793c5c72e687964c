"""Turns the wishes in a config ("auto", None) into facts, once, with a reason for each.

Asks the platform for what suits it and what it cannot do. Names of plugins stay as they are,
"auto" included: which plugins there are is the registry's business.
"""

from __future__ import annotations

from dovetail.config.checkpoint_facts import stated_dtype, stated_max_model_len
from dovetail.config.engine_config import MAX_INT, Change, ConfigNode, EngineConfig, shown
from dovetail.config.field_types import MODEL_DTYPES, reference_name
from dovetail.config.tensor_parallel import check_tensor_parallel
from dovetail.errors import ConfigError, ContractError, ModelError, nearest
from dovetail.interfaces.platform import ConfigPatch, Platform
from dovetail.plugins.construction import call_plugin
from dovetail.plugins.platform_answers import check_problems, provided_capabilities

DEFAULT_MAX_MODEL_LEN = 2048
DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
DEFAULT_MEMORY_SHARE = 0.9
DEFAULT_BLOCK_SIZE = 16
DEFAULT_DTYPE = "float32"

_GROUPS = ("cache", "scheduler", "parallel", "load", "compute", "model")
_OF_MODEL = ("model.dtype", "model.max_model_len", "model.tokenizer_mode")
"""What a platform may wish for in a group that otherwise states facts about the model."""

_DTYPE = "model.dtype"
_LENGTH = "model.max_model_len"
_SEQS = "scheduler.max_num_seqs"
_BUDGET = "scheduler.max_num_batched_tokens"
_CHUNKED = "scheduler.enable_chunked_prefill"
_CACHE_SIZES = ("cache.kv_cache_memory_bytes", "cache.num_gpu_blocks_override")

_SUBSTITUTES = {
    "bfloat16": ("float32", "float16"),
    "float16": ("float32", "bfloat16"),
    "float32": ("bfloat16", "float16"),
}
"""Nearest dtypes, those first that hold every value of the wish, then those of its range."""


def resolve(config: EngineConfig, platform: Platform) -> EngineConfig:
    """Return `config` with its wishes resolved for `platform`; `explain()` tells what and why.

    Order: what the platform wishes for open fields, then what the checkpoint states, then
    defaults. What is resolved already stays, so that resolving twice changes nothing.
    Raises ConfigError for what the checkpoint or the platform cannot do, ContractError for a
    wish of the platform that names no field or has an impossible value.
    """
    draft = _Draft(config)
    _take_requested(draft, platform)
    _resolve_dtype(draft, platform)
    _resolve_max_model_len(draft)
    _resolve_step(draft)
    dtype = draft.get(_DTYPE)
    draft.fill("cache.block_size", DEFAULT_BLOCK_SIZE, "the default")
    draft.fill("cache.gpu_memory_utilization", DEFAULT_MEMORY_SHARE, "the default")
    draft.fill("cache.kv_cache_dtype", dtype, "the cache has the dtype of the model")
    draft.fill("load.load_format", "safetensors", "the default")
    draft.fill("scheduler.scheduler_cls", "fcfs", "the default")
    draft.fill("scheduler.async_scheduling", False, "the default")
    _resolve_executor(draft)
    resolved = draft.finish()
    whose = f"platform {platform.info.name!r}"
    answer = call_plugin(whose, "problems", lambda: platform.problems(resolved))
    problems = check_problems(platform, answer)
    if problems:
        raise ConfigError(
            f"The platform {platform.info.name!r} cannot run this: {' '.join(problems)}"
        )
    return resolved


class _Draft:
    """A config on its way: reads through to the config, keeps new values and their reasons.

    config: as the user gave it. paths: fields that may be set, as "group.field".
    open: those that the user left open, whatever has been put there since.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._values: dict[str, object] = {}
        self._changes: list[Change] = []
        paths = [
            f"{group}.{field}"
            for group in _GROUPS
            for field in type(self.group(group)).model_fields
        ]
        self.paths = [path for path in paths if path in _OF_MODEL or not path.startswith("model.")]
        left = {path for path in self.paths if self.get(path) in (None, "auto")}
        if not left.issuperset(_CACHE_SIZES):
            # Two ways to say one thing: who gave one of them has not left the other open.
            left.difference_update(_CACHE_SIZES)
        self.open = frozenset(left)

    def group(self, name: str) -> ConfigNode:
        """Return a group as the user gave it."""
        group: ConfigNode = getattr(self.config, name)
        return group

    def get(self, path: str) -> object:
        """Return the value as it stands now."""
        if path in self._values:
            return self._values[path]
        group, field = path.split(".")
        return getattr(self.group(group), field)

    def count(self, path: str) -> int | None:
        """Return the value of a field of counts."""
        value = self.get(path)
        return value if isinstance(value, int) else None

    def put(self, path: str, value: object, reason: str) -> None:
        """Set a value and record why, unless it is what stands there."""
        before = self.get(path)
        if before == value:
            return
        self._values[path] = value
        self._changes.append(
            Change(
                field=path,
                before=reference_name(before),
                after=reference_name(value),
                reason=reason,
            )
        )

    def fill(self, path: str, value: object, reason: str) -> None:
        """Set a value if there is none yet."""
        if self.get(path) in (None, "auto"):
            self.put(path, value, reason)

    def finish(self) -> EngineConfig:
        """Return the config with all new values, checked."""
        groups = {}
        for name in _GROUPS:
            group = self.group(name)
            new = {
                path.split(".")[1]: value
                for path, value in self._values.items()
                if path.startswith(f"{name}.")
            }
            groups[name] = type(group)(**{**dict(group), **new})
        changes = (*self.config.changes, *self._changes)
        return EngineConfig(**{**dict(self.config), **groups, "changes": changes})


def _take_requested(draft: _Draft, platform: Platform) -> None:
    name = platform.info.name
    whose = f"platform {name!r}"
    patch: object = call_plugin(whose, "defaults", lambda: platform.defaults(draft.config))
    if not isinstance(patch, ConfigPatch):
        raise ContractError(
            f"The {whose} returned {shown(patch)} for defaults; a ConfigPatch is due."
        )
    for path, wish in patch.changes.items():
        if path not in draft.paths:
            raise ContractError(
                f"The platform {name!r} wishes for {path!r}, which is no field that it may set."
                f"{nearest(path, draft.paths)}"
            )
        value, reason = _read_requested(whose, path, wish)
        if path in draft.open:
            checked = _check_requested(draft, path, value, name)
            draft.put(path, checked, f"platform {name}: {reason}")


def _read_requested(whose: str, path: str, wish: object) -> tuple[object, str]:
    """Return value and reason; a value that nobody can explain to the user is refused."""
    if isinstance(wish, tuple) and len(wish) == 2 and isinstance(wish[1], str) and wish[1].strip():
        return wish
    raise ContractError(
        f"The {whose} wishes for {path} = {shown(wish)}; write (value, reason), the reason as the "
        "user will read it."
    )


def _check_requested(draft: _Draft, path: str, value: object, platform_name: str) -> object:
    """Return the wish in its normal form. Checked alone: the user's other values come later."""
    group_name, field = path.split(".")
    group = draft.group(group_name)
    beside = dict(group) if group_name == "model" else {}
    try:
        return getattr(type(group)(**{**beside, field: value}), field)
    except ConfigError as error:
        raise ContractError(
            f"The platform {platform_name!r} wishes for what cannot be: {error}"
        ) from None


def _resolve_dtype(draft: _Draft, platform: Platform) -> None:
    declared = [
        c.removeprefix("dtype.") for c in provided_capabilities(platform) if c.startswith("dtype.")
    ]
    # A platform that says nothing about dtypes (it may have no tensors at all) takes any.
    usable = [name for name in MODEL_DTYPES if name in declared or not declared]
    wish = draft.get(_DTYPE)
    if wish != "auto":
        if wish not in usable:
            raise ConfigError(
                f"dtype={wish!r}: the platform {platform.info.name!r} computes in "
                f'{", ".join(sorted(declared))}; give one of these, or dtype="auto".'
            )
        return
    hf_config = draft.config.model.hf_config
    stated = stated_dtype(hf_config)
    if stated is not None and stated not in MODEL_DTYPES:
        raise ConfigError(
            f'dtype="auto": config.json states dtype {stated!r}, which is none of '
            f"{', '.join(MODEL_DTYPES)}; say which of them to use with dtype."
        )
    name = stated or DEFAULT_DTYPE
    reason = f"config.json states {stated}" if stated else "config.json states no dtype"
    if name not in usable:
        lacking = f"the platform {platform.info.name} does not compute in {name}"
        name = next((other for other in _SUBSTITUTES[name] if other in usable), "")
        if not name:
            raise ConfigError(
                f'dtype="auto": {lacking}, but in {", ".join(sorted(declared))}, of which we know '
                "none; choose another platform."
            )
        reason = f"{reason}; {lacking}, and this is the nearest that it has"
    draft.put(_DTYPE, name, reason)


def _resolve_max_model_len(draft: _Draft) -> None:
    stated = stated_max_model_len(draft.config.model.hf_config)
    wish = draft.count(_LENGTH)
    if stated is None:
        reason = "config.json states no length; give max_model_len for another"
        draft.fill(_LENGTH, DEFAULT_MAX_MODEL_LEN, reason)
        return
    if wish is None or (wish > stated.most and _LENGTH in draft.open):
        if not 2 <= stated.tokens <= MAX_INT:
            raise ModelError(
                f"config.json: {stated.source} makes {stated.tokens:.6g} tokens the longest "
                f"sequence, it must be from 2 to {MAX_INT}; correct the file, use hf_overrides, or "
                "give max_model_len."
            )
        draft.put(_LENGTH, stated.tokens, f"config.json: {stated.source}")
    elif wish > stated.most:
        advice = "lower it"
        if stated.can_be_raised:
            raised = ", ".join(
                f'"{name}": {wish}' for name, tokens in stated.fields.items() if tokens < wish
            )
            advice += (
                ", or raise the model's own, if you know that it holds, with "
                f"hf_overrides={{{raised}}}"
            )
        raise ConfigError(
            f"max_model_len={wish} is more than the {stated.most} tokens that the model is made "
            f"for ({stated.source}); {advice}."
        )


def _resolve_executor(draft: _Draft) -> None:
    num_workers = draft.count("parallel.tensor_parallel_size") or 1
    check_tensor_parallel(num_workers, draft.config.model.hf_config)
    if num_workers == 1:
        draft.fill("parallel.executor_backend", "uniproc", "one device needs one process only")
    else:
        reason = f"each of tensor_parallel_size={num_workers} workers has a process of its own"
        draft.fill("parallel.executor_backend", "multiproc", reason)


def _resolve_step(draft: _Draft) -> None:
    """Resolve the limits of a step; runs after max_model_len."""
    draft.fill(_CHUNKED, True, "the default")
    given = None if _BUDGET in draft.open else draft.count(_BUDGET)
    seqs = draft.count(_SEQS) or DEFAULT_MAX_NUM_SEQS
    if _SEQS in draft.open and given is not None and given < seqs:
        reason = f"a step of max_num_batched_tokens={given} serves no more requests"
        draft.put(_SEQS, given, reason)
        seqs = given
    draft.fill(_SEQS, seqs, "the default")
    budget = draft.count(_BUDGET) or DEFAULT_MAX_NUM_BATCHED_TOKENS
    length = draft.count(_LENGTH) or 0
    if draft.get(_CHUNKED) or budget >= length:
        need, reason = seqs, f"every one of max_num_seqs={seqs} needs a token a step"
    elif given is None:
        need, reason = max(seqs, length), "a prompt must fit in a step without chunked prefill"
    else:
        raise ConfigError(
            f"max_num_batched_tokens={shown(given)} is less than max_model_len={length}, but with "
            "enable_chunked_prefill=False a prompt must fit in one step; raise the one, lower the "
            "other, or let prompts run in pieces."
        )
    if budget < need and given is None:
        draft.put(_BUDGET, need, reason)
    draft.fill(_BUDGET, budget, "the default")
