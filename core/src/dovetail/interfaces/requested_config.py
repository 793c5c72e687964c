"""The configuration that the user requested: `EngineArgs` after its checks.

"auto" and None mean that the user left a field open. `dovetail.config.resolve` turns a
`RequestedConfig` into an `EngineConfig`. Sections without open fields are the same in both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import Field, create_model, model_validator

from dovetail.errors import ConfigError
from dovetail.interfaces.config_fields import (
    KV_CACHE_DTYPES,
    MODEL_DTYPES,
    ConfigNode,
    Flag,
    FrozenMapping,
    Gigabytes,
    OpenReference,
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
    integers,
    one_of,
)
from dovetail.plugin_kinds import KINDS, Cardinality
from dovetail.sampling_params import (
    MAX_EXTRA_ARGS_BYTES,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_TEXT_CHARS,
    MAX_WORDS,
)

N = TypeVar("N", bound=ConfigNode)

MAX_PIPELINE_DEPTH = 4
MAX_LOOKAHEAD_TOKENS = 64
MAX_INT = 2**31 - 1
MAX_NUM_SEQS = 2**16
MAX_BLOCK_SIZE = 2**12
MAX_WORKERS = 64
RUNNERS = ("auto", "generate", "pooling")
POOLING_TYPES = ("auto", "last", "mean", "cls")
KV_CACHE_SCALES = ("token", "layer")
OFFLOAD_OPTION = "cpu_offload_gb"
"""Name of the field `RequestedCache.cpu_offload_gb`, for other packages."""
GRAPH_MODES = ("full_and_piecewise", "full", "piecewise", "none")
COMPILE_LEVELS = ("none", "as_is", "once", "piecewise")
MAX_COMPILE_SIZES = 64


def _with_plugin_fields(cls: type[N]) -> type[N]:
    """Return the class with fields added for the plugin kinds that it does not declare itself."""
    types = {
        Cardinality.OPTIONAL: (OptionalReference, None),
        Cardinality.MANY: (PluginReferences, ()),
    }
    fields: dict[str, Any] = {
        kind.option: types[kind.cardinality]
        for kind in KINDS.values()
        if kind.field == f"extensions.{kind.option}" and kind.option not in cls.model_fields
    }
    if not fields:
        return cls
    return create_model(
        cls.__name__, __base__=cls, __module__=__name__, __doc__=cls.__doc__, **fields
    )


class CheckpointFields(ConfigNode):
    """The model directory and the contents of its configuration files.

    model_dir: the absolute path. architecture: the name in config.json. hf_config: config.json with
    hf_overrides applied. quantization: "method", "source" and "config" of a quantized checkpoint;
    else empty.
    pooler: how the model pools; empty if it generates. "pooling": "last", "mean", "cls", "auto" for
    the model's default, or "" for one result for each token only. "normalize": whether embeddings
    have length 1. "dense": dense layers after pooling, mappings with directory, in_features,
    out_features, bias, activation. "whole_prompts": whether prompts must not be split over steps.
    "max_seq_length": the longest prompt that the model was trained for, if stated.
    """

    model_dir: Path
    architecture: Text
    hf_config: FrozenMapping
    quantization: FrozenMapping = Field(default={}, validate_default=True)
    pooler: FrozenMapping = Field(default={}, validate_default=True)
    seed: Annotated[int, integer(0, 2**63 - 1)] = 0
    enforce_eager: Flag = False


class RequestedModel(CheckpointFields):
    """The model and its files.

    model: the path or name that the user gave. tokenizer_dir: the absolute path. generation_config:
    the sampling defaults with the user's overrides applied. defaults: values for open fields that
    the model's file format needs, by "section.field". dtype: "auto" or a name. max_model_len:
    maximum tokens of a request, prompt and output together.
    """

    model: Text
    tokenizer_dir: Path
    tokenizer_mode: PluginReference = "auto"
    skip_tokenizer_init: Flag = False
    generation_config: FrozenMapping = Field(default={}, validate_default=True)
    defaults: FrozenMapping = Field(default={}, validate_default=True)
    dtype: Annotated[str, dtype_name(MODEL_DTYPES)] = "auto"
    max_model_len: Annotated[int | None, integer(2, MAX_INT, optional=True)] = None
    served_model_name: Text
    max_logprobs: Annotated[int, integer(0, MAX_LOGPROBS)] = 20


class RequestedCache(ConfigNode):
    """The KV cache, and the memory of the device.

    block_size: tokens. gpu_memory_utilization: fraction of the device's memory.
    kv_cache_scales: scales of a cache of int8 or fp8: "token" for a computed scale of each token
    and head, "layer" for one key scale and one value scale per layer, which the checkpoint contains
    (1 if it does not); None for the first of these that the dtype supports.
    enable_sleep_mode: whether weights and cache are in memory that `sleep` can release.
    cpu_offload_gb: GiB of weights per worker that stay in host memory; each step copies them to the
    device.
    """

    block_size: Annotated[int | None, integer(1, MAX_BLOCK_SIZE, optional=True)] = None
    gpu_memory_utilization: OptionalShare = None
    kv_cache_memory_bytes: Annotated[int | None, integer(1, 2**50, optional=True)] = None
    num_gpu_blocks_override: Annotated[int | None, integer(1, MAX_INT, optional=True)] = None
    kv_cache_dtype: Annotated[str, dtype_name(KV_CACHE_DTYPES)] = "auto"
    kv_cache_scales: Annotated[str | None, one_of(*KV_CACHE_SCALES, optional=True)] = None
    enable_prefix_caching: Flag = True
    enable_sleep_mode: Flag = False
    cpu_offload_gb: Gigabytes = 0.0

    @property
    def offload_bytes(self) -> int:
        """The bytes of `cpu_offload_gb`."""
        return round(self.cpu_offload_gb * 2**30)

    @model_validator(mode="after")
    def _check_memory(self) -> Self:
        if self.enable_sleep_mode and self.cpu_offload_gb:
            raise ConfigError(
                f"enable_sleep_mode=True and cpu_offload_gb={self.cpu_offload_gb} cannot be used "
                "together; set only one of them."
            )
        return self

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if self.kv_cache_memory_bytes is not None and self.num_gpu_blocks_override is not None:
            raise ConfigError(
                f"kv_cache_memory_bytes={self.kv_cache_memory_bytes} and "
                f"num_gpu_blocks_override={self.num_gpu_blocks_override} both set the size of the "
                "KV cache; set only one of them."
            )
        return self


class RequestedScheduler(ConfigNode):
    """The limits of a step and of the scheduler. Units: requests and tokens.

    pipeline_depth: steps that may be in flight. num_lookahead_tokens: maximum drafts of a request.
    max_num_encoder_tokens: placeholder tokens whose content is encoded in one step; 0 for a model
    without an encoder. encoder_cache_tokens: placeholder tokens whose encoder output is cached;
    None for max_num_encoder_tokens. admission_timeout_s: how long a request may wait for gates.
    """

    scheduler_cls: PluginReference = "auto"
    max_num_seqs: Annotated[int | None, integer(1, MAX_NUM_SEQS, optional=True)] = None
    max_num_batched_tokens: Annotated[int | None, integer(1, MAX_INT, optional=True)] = None
    enable_chunked_prefill: OptionalFlag = None
    long_prefill_token_threshold: Annotated[int, integer(0, MAX_INT)] = 0
    async_scheduling: OptionalFlag = None
    pipeline_depth: Annotated[int | None, integer(1, MAX_PIPELINE_DEPTH, optional=True)] = None
    num_lookahead_tokens: Annotated[int, integer(0, MAX_LOOKAHEAD_TOKENS)] = 0
    max_num_encoder_tokens: Annotated[int, integer(0, MAX_INT)] = 0
    encoder_cache_tokens: Annotated[int | None, integer(0, MAX_INT, optional=True)] = None
    admission_timeout_s: Seconds = 60.0

    @model_validator(mode="after")
    def _check_pipeline(self) -> Self:
        depth, ahead = self.pipeline_depth, self.async_scheduling
        if depth is not None and ahead is not None and ahead != (depth > 1):
            raise ConfigError(
                f"pipeline_depth={depth} and async_scheduling={ahead} conflict with each other; do "
                "not set async_scheduling."
            )
        if self.encoder_cache_tokens and not self.max_num_encoder_tokens:
            raise ConfigError(
                f"encoder_cache_tokens={self.encoder_cache_tokens} has no effect without "
                "max_num_encoder_tokens; set both or neither."
            )
        return self

    @model_validator(mode="after")
    def _check_step(self) -> Self:
        budget, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if budget is not None and seqs is not None and budget < seqs:
            raise ConfigError(
                f"max_num_batched_tokens={budget} is less than max_num_seqs={seqs}, but every "
                "running request needs a token in each step; raise the former or lower the latter."
            )
        if self.enable_chunked_prefill is False and self.long_prefill_token_threshold:
            raise ConfigError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} splits prompts, "
                "but enable_chunked_prefill=False forbids that; set only one of them."
            )
        return self


class RequestedParallel(ConfigNode):
    """Processes, devices and workers.

    engine_process: whether the engine core runs in a separate process. tensor_parallel_size:
    workers that share each layer. start_timeout_s: time limit of each startup phase.
    """

    platform: PluginReference = "auto"
    worker_cls: OpenReference = "auto"
    executor_backend: PluginReference = "auto"
    engine_process: Flag = False
    start_timeout_s: Annotated[int, integer(1, MAX_INT)] = 600
    tensor_parallel_size: Annotated[int, integer(1, MAX_WORKERS)] = 1
    pipeline_parallel_size: Annotated[int, exactly(1, "layers are not split into stages")] = 1
    data_parallel_size: Annotated[
        int, exactly(1, "one engine is one copy of the model; start several engines")
    ] = 1


class RequestedLoad(ConfigNode):
    """How weights are loaded."""

    load_format: PluginReference = "auto"
    use_tqdm_on_load: Flag = True


class RequestedCompute(ConfigNode):
    """The plugins for computation.

    num_threads: number of threads on platforms that compute on the CPU.
    batch_invariant: use only plugins that guarantee bit-identical tokens and log-probabilities of a
    request for any batch and any number of threads.
    graph_mode: which steps of a device with graphs are captured: "full" for steps with one token
    per request, "piecewise" for all steps, without attention; "full_and_piecewise" for both.
    max_graph_size: maximum number of requests or tokens of a captured step.
    custom_all_reduce: all-reduce small tensors through memory that the workers' devices share.
    matmul_precision: torch's precision of float32 matrix products: "highest" for float32, "high"
    for TensorFloat32 or two bfloat16 numbers, "medium" for bfloat16.
    compile_level: how torch.compile is used: "none", "as_is" (shapes and guards by torch), "once"
    (one graph for any number of tokens, without guards), "piecewise" (the graph is split at
    attention). compile_backend, compile_passes: plugins. compile_sizes: numbers of tokens for which
    the pieces are also compiled with fixed shapes. compile_cache: directory of compiled code,
    "auto" (resolved: None) for the user's cache directory, "off" for none.
    """

    attention_backend: OpenReference = "auto"
    linear_method: OpenReference = "auto"
    ops: OpenReference = "auto"
    batch_invariant: Flag = False
    num_threads: Annotated[int | None, integer(1, 4096, optional=True)] = None
    graph_mode: Annotated[str, one_of(*GRAPH_MODES)] = "full_and_piecewise"
    max_graph_size: Annotated[int, integer(1, 8192)] = 512
    custom_all_reduce: Flag = False
    matmul_precision: Annotated[str, one_of("highest", "high", "medium")] = "highest"
    compile_level: Annotated[str | None, one_of(*COMPILE_LEVELS, optional=True)] = None
    compile_backend: OpenReference = "auto"
    compile_passes: PluginReferences = ()
    compile_sizes: Annotated[tuple[int, ...], integers(1, MAX_INT, MAX_COMPILE_SIZES)] = ()
    compile_cache: Text | None = "auto"


class ObservabilityConfig(ConfigNode):
    """Statistics and logs. decision_log: the file to which plans and results are recorded."""

    disable_log_stats: Flag = True
    decision_log: Path | None = None


class LimitsConfig(ConfigNode):
    """Limits on the size of the values of a request. Larger values are rejected.

    max_prompt_chars: limit of a text prompt; None: max_model_len times the length of the
    vocabulary's longest token (at least 8), limited to 16,777,216. max_id_chars: limit of
    request_id, cache_salt, tenant and lora_id. max_stop_chars, max_bad_word_chars: limits of each
    string;
    max_bad_words_chars: limit of all bad words together. max_extra_args_bytes: limit of the
    serialized `extra_args`. max_prompts: limit of a call of `LLM.generate`. max_chat_messages:
    limit of a conversation of `LLM.chat`. Lists of token ids are limited by the vocabulary, token
    prompts by max_model_len.
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


@_with_plugin_fields
class ExtensionsConfig(ConfigNode):
    """Plugins that the user adds to an engine, in the order given.

    kv_transfer_timeout_s: seconds after which a KV block's load counts as failed.
    """

    worker_extension_cls: OptionalReference = None
    logits_processors: PluginReferences = ()
    step_extensions: PluginReferences = ()
    admission_gates: PluginReferences = ()
    grammar_backend: OptionalReference = None
    tool_parser: OptionalReference = None
    reasoning_parser: OptionalReference = None
    io_processor: OptionalReference = None
    kv_connector: OptionalReference = None
    kv_transfer_timeout_s: Seconds = 30.0
    stat_loggers: PluginReferences = ()
    hooks: PluginReferences = ()
    http_routes: PluginReferences = ()


class PluginsConfig(ConfigNode):
    """Which plugins may be used. `PluginPolicy.of` checks the rules."""

    plugins_allow: Rules = ()
    plugins_deny: Rules = ()
    no_plugins: Flag = False
    plugins_strict: Flag = False
    trust_local_code: Flag = False


class CommonSections(ConfigNode):
    """The sections without open fields. plugin_options: the options by plugin name."""

    observability: ObservabilityConfig = ObservabilityConfig()
    extensions: ExtensionsConfig = ExtensionsConfig()
    limits: LimitsConfig = LimitsConfig()
    plugins: PluginsConfig = PluginsConfig()
    plugin_options: FrozenMapping = Field(default={}, validate_default=True)

    @model_validator(mode="after")
    def _check_decision_log(self) -> Self:
        log, connector = self.observability.decision_log, self.extensions.kv_connector
        if log is not None and connector is not None:
            raise ConfigError(
                f"decision_log={str(log)!r} cannot record the results of "
                f"kv_connector={connector!r}; set only one of them."
            )
        return self


class RequestedConfig(CommonSections):
    """The checked values that the user requested. Open values are "auto" or None."""

    model: RequestedModel
    cache: RequestedCache = RequestedCache()
    scheduler: RequestedScheduler = RequestedScheduler()
    parallel: RequestedParallel = RequestedParallel()
    load: RequestedLoad = RequestedLoad()
    compute: RequestedCompute = RequestedCompute()
