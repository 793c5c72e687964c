"""The configuration of an engine: a frozen tree of checked values.

Made from `EngineArgs`, completed once by `dovetail.config.resolve`, then only read and handed to
every process. Before that, "auto" and None are wishes left open; after it, only names of plugins
may still be "auto". Loads no plugin and reads no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dovetail.config.field_types import (
    KV_CACHE_DTYPES,
    MODEL_DTYPES,
    Flag,
    FrozenMapping,
    OptionalFlag,
    OptionalReference,
    OptionalShare,
    PluginReference,
    PluginReferences,
    Rules,
    Seconds,
    Text,
    dtype_name,
    exactly,
    integer,
)
from dovetail.errors import ConfigError, nearest
from dovetail.plugins.plugin_policy import PluginPolicy
from dovetail.sampling_params import (
    MAX_EXTRA_ARGS_BYTES,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_TEXT_CHARS,
    MAX_WORDS,
)
from dovetail.value_checks import shorten

MAX_INT = 2**31 - 1
MAX_NUM_SEQS = 2**16
MAX_BLOCK_SIZE = 2**12
MAX_WORKERS = 64
MAX_ERRORS_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Change:
    """A value that was set for the user, and why. field: "group.field"."""

    field: str
    before: Any
    after: Any
    reason: str


def shown(value: object) -> str:
    """Return `value` as error messages show it: on one line, cut when long; never raise."""
    return shorten(value)


class ConfigNode(BaseModel):
    """A node of the tree: frozen, unknown fields refused, every refusal a ConfigError."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), ser_json_inf_nan="constants"
    )

    def __init__(self, **values: Any) -> None:
        """Check `values`; raise ConfigError naming field, value and what would do."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _translate(error, type(self)) from None

    @classmethod
    def model_validate(cls, *args: Any, **kwargs: Any) -> Self:
        """Make a node from a mapping; raise ConfigError."""
        try:
            return super().model_validate(*args, **kwargs)
        except ValidationError as error:
            raise _translate(error, cls) from None

    @classmethod
    def model_validate_json(cls, *args: Any, **kwargs: Any) -> Self:
        """Make a node from JSON text; raise ConfigError."""
        try:
            return super().model_validate_json(*args, **kwargs)
        except ValidationError as error:
            raise _translate(error, cls) from None


class ModelConfig(ConfigNode):
    """Which model, and how it is read.

    model: as the user gave it; model_dir, tokenizer_dir: absolute. architecture: of config.json.
    hf_config: config.json under hf_overrides. generation_config: under its overrides.
    quantization: "method", "source" and "config" of a quantized checkpoint; empty for others.
    dtype: "auto" or a name. max_model_len: tokens of a request, prompt and output together.
    """

    model: Text
    model_dir: Path
    tokenizer_dir: Path
    tokenizer_mode: PluginReference = "auto"
    skip_tokenizer_init: Flag = False
    architecture: Text
    hf_config: FrozenMapping
    generation_config: FrozenMapping = Field(default={}, validate_default=True)
    quantization: FrozenMapping = Field(default={}, validate_default=True)
    dtype: Annotated[str, dtype_name(MODEL_DTYPES)] = "auto"
    max_model_len: Annotated[int | None, integer(2, MAX_INT, optional=True)] = None
    seed: Annotated[int, integer(0, 2**63 - 1)] = 0
    served_model_name: Text
    max_logprobs: Annotated[int, integer(0, MAX_LOGPROBS)] = 20
    enforce_eager: Flag = False


class CacheConfig(ConfigNode):
    """The KV cache. block_size: tokens. gpu_memory_utilization: share of the device's memory."""

    block_size: Annotated[int | None, integer(1, MAX_BLOCK_SIZE, optional=True)] = None
    gpu_memory_utilization: OptionalShare = None
    kv_cache_memory_bytes: Annotated[int | None, integer(1, 2**50, optional=True)] = None
    num_gpu_blocks_override: Annotated[int | None, integer(1, MAX_INT, optional=True)] = None
    kv_cache_dtype: Annotated[str, dtype_name(KV_CACHE_DTYPES)] = "auto"
    enable_prefix_caching: Flag = True

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if self.kv_cache_memory_bytes is not None and self.num_gpu_blocks_override is not None:
            raise ConfigError(
                f"kv_cache_memory_bytes={self.kv_cache_memory_bytes} and "
                f"num_gpu_blocks_override={self.num_gpu_blocks_override} both set the size of the "
                "KV cache; give one of them."
            )
        return self


class SchedulerConfig(ConfigNode):
    """What a step and the scheduler may hold. Units: requests and tokens."""

    scheduler_cls: PluginReference = "auto"
    max_num_seqs: Annotated[int | None, integer(1, MAX_NUM_SEQS, optional=True)] = None
    max_num_batched_tokens: Annotated[int | None, integer(1, MAX_INT, optional=True)] = None
    enable_chunked_prefill: OptionalFlag = None
    long_prefill_token_threshold: Annotated[int, integer(0, MAX_INT)] = 0
    async_scheduling: OptionalFlag = None

    @model_validator(mode="after")
    def _check_step(self) -> Self:
        budget, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if budget is not None and seqs is not None and budget < seqs:
            raise ConfigError(
                f"max_num_batched_tokens={budget} is less than max_num_seqs={seqs}, but every "
                "running request needs a token a step; raise the one or lower the other."
            )
        if self.enable_chunked_prefill is False and self.long_prefill_token_threshold:
            raise ConfigError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} cuts prompts in "
                "pieces, but enable_chunked_prefill=False forbids that; leave one of them out."
            )
        return self


class ParallelConfig(ConfigNode):
    """Where the work is done, and by how many.

    engine_process: whether the engine core has a process of its own. tensor_parallel_size: workers
    that share a layer. start_timeout_s: for each phase of the start.
    """

    platform: PluginReference = "auto"
    worker_cls: PluginReference = "auto"
    executor_backend: PluginReference = "auto"
    engine_process: Flag = False
    start_timeout_s: Annotated[int, integer(1, MAX_INT)] = 600
    tensor_parallel_size: Annotated[int, integer(1, MAX_WORKERS)] = 1
    pipeline_parallel_size: Annotated[int, exactly(1, "layers are not cut into stages")] = 1
    data_parallel_size: Annotated[
        int, exactly(1, "one engine is one copy of the model; start several")
    ] = 1


class LoadConfig(ConfigNode):
    """How weights are loaded."""

    load_format: PluginReference = "auto"
    use_tqdm_on_load: Flag = True


class ComputeConfig(ConfigNode):
    """What computes. num_threads: of platforms that compute on the CPU.

    batch_invariant: only parts that promise it may be chosen: a request's tokens and log-
    probabilities have the same bits whatever runs beside it, and on any number of threads.
    """

    attention_backend: PluginReference = "auto"
    linear_method: PluginReference = "auto"
    ops: PluginReference = "auto"
    batch_invariant: Flag = False
    num_threads: Annotated[int | None, integer(1, 4096, optional=True)] = None


class ObservabilityConfig(ConfigNode):
    """What the engine tells of itself. decision_log: the file to record a scheduler's plans in."""

    disable_log_stats: Flag = True
    decision_log: Path | None = None


class LimitsConfig(ConfigNode):
    """How large the values of a request may be; what is larger is refused before it is used.

    max_prompt_chars: of a prompt as text; None for max_model_len times the characters of the
    vocabulary's longest token (at least 8), 16,777,216 at most. max_id_chars: of request_id,
    cache_salt, tenant and lora_id. max_stop_chars, max_bad_word_chars: of one of them;
    max_bad_words_chars: of all bad words together. max_extra_args_bytes: of `extra_args` as a
    message. max_prompts, max_chat_messages: in a call of `LLM.generate` and in a conversation of
    `LLM.chat`. Lists of token ids are limited by the vocabulary, prompts of them by max_model_len.
    """

    max_prompt_chars: Annotated[int | None, integer(1, MAX_INT, optional=True)] = None
    max_id_chars: Annotated[int, integer(1, 2**16)] = 1024
    max_stop_strings: Annotated[int, integer(0, MAX_STOP_STRINGS)] = MAX_STOP_STRINGS
    max_stop_chars: Annotated[int, integer(1, MAX_TEXT_CHARS)] = 1024
    max_bad_words: Annotated[int, integer(0, MAX_WORDS)] = MAX_WORDS
    max_bad_word_chars: Annotated[int, integer(1, MAX_TEXT_CHARS)] = 256
    max_bad_words_chars: Annotated[int, integer(1, MAX_INT)] = 2**17
    max_extra_args_bytes: Annotated[int, integer(0, MAX_EXTRA_ARGS_BYTES)] = 2**16
    max_prompts: Annotated[int, integer(1, MAX_INT)] = 2**20
    max_chat_messages: Annotated[int, integer(1, MAX_INT)] = 4096


class ExtensionsConfig(ConfigNode):
    """Plugins that no engine needs: what the user adds to it, in the order given.

    kv_transfer_timeout_s: seconds after which a KV block's load counts as failed.
    """

    worker_extension_cls: OptionalReference = None
    logits_processors: PluginReferences = ()
    step_extensions: PluginReferences = ()
    grammar_backend: OptionalReference = None
    io_processor: OptionalReference = None
    kv_connector: OptionalReference = None
    kv_transfer_timeout_s: Seconds = 30.0
    stat_loggers: PluginReferences = ()
    hooks: PluginReferences = ()


class PluginsConfig(ConfigNode):
    """What the user lets plugins do; no platform has a wish here."""

    plugins_allow: Rules = ()
    plugins_deny: Rules = ()
    no_plugins: Flag = False
    plugins_strict: Flag = False
    trust_local_code: Flag = False

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        self.policy()
        return self

    def policy(self) -> PluginPolicy:
        """Return it as the plugin registry takes it; raise ConfigError for a wrong rule."""
        return PluginPolicy(
            allow=self.plugins_allow,
            deny=self.plugins_deny,
            no_plugins=self.no_plugins,
            strict=self.plugins_strict,
            trust_local_code=self.trust_local_code,
        )


class EngineConfig(ConfigNode):
    """The configuration of one engine. plugin_options: by plugin name.

    changes: what was set for the user so far, oldest first; shipped along, so that every process
    can explain itself.
    """

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    load: LoadConfig = LoadConfig()
    compute: ComputeConfig = ComputeConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    extensions: ExtensionsConfig = ExtensionsConfig()
    limits: LimitsConfig = LimitsConfig()
    plugins: PluginsConfig = PluginsConfig()
    plugin_options: FrozenMapping = Field(default={}, validate_default=True)
    changes: tuple[Change, ...] = ()

    @model_validator(mode="after")
    def _check_decision_log(self) -> Self:
        log, connector = self.observability.decision_log, self.extensions.kv_connector
        if log is not None and connector is not None:
            raise ConfigError(
                f"decision_log={str(log)!r} cannot record what kv_connector={connector!r} answers; "
                "leave one of the two out."
            )
        return self

    def explain(self) -> list[Change]:
        """Return every value that was set for the user, with its reason, in order."""
        return list(self.changes)


def _translate(error: ValidationError, node: type[ConfigNode]) -> ConfigError:
    """Return pydantic's findings in our words, one a line."""
    found = error.errors(include_url=False)
    lines = [_sentence(detail, node) for detail in found[:MAX_ERRORS_SHOWN]]
    if len(found) > MAX_ERRORS_SHOWN:
        lines[-1] += f" (and {len(found) - MAX_ERRORS_SHOWN} more)"
    return ConfigError("\n".join(lines))


def _sentence(detail: Mapping[str, Any], node: type[ConfigNode]) -> str:
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    *_, name = detail["loc"] or (node.__name__,)
    if isinstance(name, int):
        name = f"{detail['loc'][-2]}[{name}]"
    if detail["type"] == "extra_forbidden":
        return f"Unknown field {name!r} in {node.__name__}.{nearest(name, node.model_fields)}"
    if detail["type"] == "missing":
        return f"{name} is missing in {node.__name__}; give it."
    text = str(cause) if cause else f"is refused: {detail['msg']}"
    return f"{name}={shown(detail['input'])} {text}."
