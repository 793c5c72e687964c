"""The options of an engine in one flat class, with vLLM's names for options that vLLM also has.

This module has only names and defaults; `create_engine_config` checks the values. Standard library
only, because `from dovetail import LLM` imports this module.
"""

# ruff: noqa: RUF009  # `_option` returns a dataclass field
from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dovetail.errors import ConfigError, nearest
from dovetail.plugin_kinds import KINDS, Cardinality

if TYPE_CHECKING:
    from dovetail.interfaces.requested_config import RequestedConfig

C = TypeVar("C", bound=type)


def _help(text: str) -> dict[str, str]:
    """Return the metadata of a field: its line in `--help`."""
    return {"help": text}


def _option(default: object, text: str) -> Any:
    """Return a field with a default and its line in `--help`."""
    return field(default=default, metadata=_help(text))


def _explaining(cls: C) -> C:
    """Make the constructor of a dataclass raise ConfigError for unknown names."""
    construct = cls.__init__  # type: ignore[misc]  # of this class, not of a subclass
    known = [option.name for option in fields(cls)]

    @functools.wraps(construct)
    def explain(self: object, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise ConfigError(f"Unknown engine option {name!r}.{nearest(name, known)}")
        if not args and "model" not in kwargs:
            raise ConfigError("The option model is missing; specify the path of a model directory.")
        construct(self, *args, **kwargs)

    type.__setattr__(cls, "__init__", explain)
    return cls


def _with_plugin_options(cls: C) -> C:
    """Add the option of each plugin kind that the class does not declare itself."""
    options = {
        Cardinality.ONE: ("str | type", "auto"),
        Cardinality.OPTIONAL: ("str | type | None", None),
        Cardinality.MANY: ("tuple[str | type, ...]", ()),
    }
    for kind in KINDS.values():
        if kind.option and kind.option not in cls.__annotations__:
            hint, default = options[kind.cardinality]
            cls.__annotations__[kind.option] = hint
            text = f"{kind.name.replace('_', ' ').capitalize()} plugin: {kind.summary}."
            setattr(cls, kind.option, field(default=default, metadata=_help(text)))
    return cls


@_explaining
@dataclass(frozen=True, kw_only=True)
@_with_plugin_options
class EngineArgs:
    """The options of an engine. Frozen; `dataclasses.replace` makes a changed copy.

    A plugin is named by its name, `name@distribution` or `pkg.mod:Class`, or given as a class.
    "auto" and None leave the choice to the engine. The metadata of a field has its help line.
    Raises ConfigError for an unknown name, with the nearest known one.
    """

    model: str | Path = field(kw_only=False, metadata=_help("Path or name of a model."))
    tokenizer: str | Path | None = _option(
        None, "Directory of the tokenizer; None: the model directory."
    )
    tokenizer_mode: str | type = _option("auto", 'Tokenizer plugin, or "auto".')
    skip_tokenizer_init: bool = _option(
        False, "Load no tokenizer: prompts and outputs are token ids."
    )
    trust_remote_code: bool = _option(
        False, "Not supported: code in a model directory is never run."
    )
    model_impl: str = _option(
        "auto",
        'Implementation: "auto", "native" or "transformers".',
    )
    runner: str = _option(
        "auto",
        'Task of the engine: "auto", "generate" or "pooling" (embeddings, scores).',
    )
    pooling_type: str = _option(
        "auto", 'Pooling of token states: "auto" (the model\'s), "last", "mean" or "cls".'
    )
    revision: str | None = _option(None, "Branch, tag or commit of a model on the hub; None: main.")
    dtype: str = _option("auto", '"auto", "float32", "bfloat16" or "float16".')
    seed: int = _option(0, "Default seed of requests and random weights.")
    max_model_len: int | None = _option(
        None, "Maximum number of tokens of a request, prompt and output together."
    )
    hf_overrides: Mapping[str, Any] | None = _option(
        None, "Values that replace those of config.json; `architectures` may be a class."
    )
    served_model_name: str | None = _option(None, "Name of the model for clients; None: `model`.")
    generation_config: str | Path = _option(
        "auto", 'Sampling defaults: "auto" (the model\'s), "none", or a path.'
    )
    override_generation_config: Mapping[str, Any] | None = _option(
        None, "Values that replace sampling defaults."
    )
    enforce_eager: bool = _option(False, "Do not capture graphs and do not compile the model.")
    max_logprobs: int = _option(
        20, "Maximum number of logprobs that a request may have per position."
    )
    load_format: str | type = _option("auto", 'Weight loader plugin, or "auto" (safetensors).')
    use_tqdm_on_load: bool = _option(True, "Show a progress bar while weights are loaded.")
    block_size: int | None = _option(None, "Tokens in a KV-cache block; None: 16.")
    gpu_memory_utilization: float | None = _option(
        None, "Fraction of device memory to use; None: 0.9, or less for shared memory."
    )
    kv_cache_memory_bytes: int | None = _option(
        None, "Size of the KV cache in bytes; None: computed from gpu_memory_utilization."
    )
    num_gpu_blocks_override: int | None = _option(
        None, "Number of blocks in the KV cache; None: as many as fit."
    )
    kv_cache_dtype: str = _option("auto", 'Dtype of the KV cache; "auto": the model\'s.')
    kv_cache_scales: str | None = _option(
        None, 'Scales of an int8 or fp8 KV cache: "token" or "layer".'
    )
    enable_prefix_caching: bool = _option(
        True, "Keep full blocks, and reuse them for requests with the same prefix."
    )
    enable_sleep_mode: bool = _option(
        False, "Let `sleep` release the memory of weights and KV cache."
    )
    cpu_offload_gb: float = _option(0.0, "GiB of weights per device to keep in host memory.")
    max_num_seqs: int | None = _option(None, "Maximum number of running requests; None: 256.")
    max_num_batched_tokens: int | None = _option(
        None, "Maximum number of tokens in a step; None: 2048."
    )
    enable_chunked_prefill: bool | None = _option(
        None, "Split prompts over several steps; None: yes."
    )
    long_prefill_token_threshold: int = _option(
        0, "Maximum number of tokens of one prompt in a step; 0: no limit."
    )
    scheduler_cls: str | type = _option("auto", 'Scheduler or policy plugin; "auto": fcfs.')
    scheduling_policy: str | type | None = _option(None, "Alias of scheduler_cls.")
    async_scheduling: bool | None = _option(
        None, "Plan a step while the previous step runs; None: the platform's default."
    )
    pipeline_depth: int | None = _option(
        None, "Steps in flight, 1 to 4; None: 2 with async_scheduling, otherwise 1."
    )
    num_lookahead_tokens: int = _option(
        0, "Maximum number of draft tokens of a request in a step; 0: no drafts."
    )
    max_num_encoder_tokens: int = _option(
        0, "Maximum number of placeholder tokens that are encoded in a step."
    )
    encoder_cache_tokens: int | None = _option(
        None, "Size of the encoder cache, in tokens; None: max_num_encoder_tokens."
    )
    admission_timeout_s: float = _option(
        60.0, "Seconds that a request may wait for a grammar or another gate."
    )
    platform: str | type = _option("auto", "Platform plugin: the kind of machine to run on.")
    worker_cls: str | type = _option("auto", "Worker plugin.")
    worker_extension_cls: str | type = _option("", "Class with methods to add to the worker class.")
    executor_backend: str | type = _option(
        "auto", 'Executor plugin; "auto": uniproc, or multiproc.'
    )
    distributed_executor_backend: str | type | None = _option(None, "Alias of executor_backend.")
    engine_process: bool = _option(False, "Run the engine core in a separate process.")
    start_timeout_s: int = _option(600, "Timeout of each startup phase, in seconds.")
    attention_backend: str | type = _option("auto", "Attention plugin.")
    linear_method: str | type = _option("auto", "Linear method plugin (packing, quantization).")
    quantization: str | type | None = _option(
        None, 'Quantize on load: "int8", "q4_k", "int4", "fp8"; see linear_method.'
    )
    ops: str | type = _option("auto", "Op provider plugin (norms, rotary embedding, …).")
    batch_invariant: bool = _option(
        False, "Use only plugins whose results are bitwise independent of the batch."
    )
    tensor_parallel_size: int = _option(1, "Number of workers that split each layer.")
    pipeline_parallel_size: int = _option(1, "Number of pipeline stages; only 1 is supported.")
    data_parallel_size: int = _option(1, "Number of copies of the model; only 1 is supported.")
    num_threads: int | None = _option(
        None, "Number of CPU threads, for platforms that compute on the CPU."
    )
    graph_mode: str = _option(
        "full_and_piecewise",
        'Steps to capture: "full_and_piecewise", "full", "piecewise", "none".',
    )
    max_graph_size: int = _option(512, "Maximum number of requests or tokens of a captured step.")
    custom_all_reduce: bool = _option(
        False, "All-reduce small tensors of several devices through shared memory."
    )
    matmul_precision: str = _option(
        "highest", 'Precision of float32 matrix products: "highest", "high" or "medium".'
    )
    compile_level: str | None = _option(
        None, 'torch.compile: "none" (default), "as_is", "once" or "piecewise".'
    )
    compile_backend: str | type = _option("auto", 'Compile backend plugin; "auto": inductor.')
    compile_passes: tuple[str | type, ...] = _option(
        (), "Graph pass plugins, which change the graph before it is compiled."
    )
    compile_sizes: tuple[int, ...] = _option(
        (), "Numbers of tokens for which code with fixed shapes is compiled."
    )
    compile_cache: str | Path = _option(
        "auto", 'Directory of compiled code; "auto": the user\'s cache, "off": none.'
    )
    disable_log_stats: bool = _option(True, "Do not log statistics.")
    decision_log: str | Path | None = _option(
        None, "New file to which the scheduler's decisions are written."
    )
    stat_loggers: tuple[str | type, ...] = _option(
        (), "Stat logger plugins, notified of every step."
    )
    logits_processors: tuple[str | type, ...] = _option(
        (), "Logits processor plugins, in the order in which they run."
    )
    step_extensions: tuple[str | type, ...] = _option(
        (), "Step extension plugins, in the order in which they run."
    )
    admission_gates: tuple[str | type, ...] = _option(
        (), "Admission gate plugins, which hold back new requests."
    )
    grammar_backend: str | type | None = _option(
        None, "Grammar plugin, or none, for requests with structured_outputs."
    )
    tool_parser: str | type | None = _option(
        None, "Tool parser plugin, or none; None: chosen by the chat template."
    )
    reasoning_parser: str | type | None = _option(
        None, "Reasoning parser plugin, or none; None: chosen by the chat template."
    )
    io_processor: str | type | None = _option(None, "IO processor plugin, for LLM.process.")
    kv_connector: str | type | None = _option(
        None, "KV connector plugin, which stores KV blocks elsewhere."
    )
    kv_transfer_timeout_s: float = _option(
        30.0, "Seconds after which a KV connector's load counts as failed."
    )
    hooks: tuple[str | type, ...] = _option(
        (), "Hooks plugins, notified of start, steps, errors and stop."
    )
    max_prompt_chars: int | None = _option(
        None, "Maximum number of characters of a prompt; None: set from max_model_len."
    )
    max_id_chars: int = _option(
        1024, "Maximum number of characters of a request_id, salt, tenant or lora_id."
    )
    max_stop_strings: int = _option(64, "Maximum number of stop strings of a request.")
    max_stop_chars: int = _option(1024, "Maximum number of characters of a stop string.")
    max_bad_words: int = _option(4096, "Maximum number of bad words of a request.")
    max_bad_word_chars: int = _option(256, "Maximum number of characters of a bad word.")
    max_bad_words_chars: int = _option(
        131_072, "Maximum number of characters of all bad words of a request."
    )
    max_extra_args_bytes: int = _option(65_536, "Maximum size of a request's extra_args, in bytes.")
    max_prompts: int = _option(1_048_576, "Maximum number of prompts in a call of LLM.generate.")
    max_chat_messages: int = _option(
        4096, "Maximum number of messages in a conversation of LLM.chat."
    )
    plugin_options: Mapping[str, Any] = field(
        default_factory=dict, metadata=_help("Options of plugins, by plugin name.")
    )
    plugins_allow: tuple[str, ...] = _option(
        (), "Third-party plugins that may be selected automatically: kind:name@dist."
    )
    plugins_deny: tuple[str, ...] = _option(
        (), "Plugins that must not be used: kind:name@dist, * for any."
    )
    no_plugins: bool = _option(False, "Use first-party plugins only.")
    plugins_strict: bool = _option(
        False, "Raise the error of a plugin that fails in automatic selection."
    )
    trust_local_code: bool = _option(False, "Allow plugins that are named as ./file.py:Class.")

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineArgs:
        """Return the options in `kwargs`; raise ConfigError for an unknown name."""
        return cls(**kwargs)

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """Return the help line of each option by name."""
        return {option.name: option.metadata["help"] for option in fields(cls)}

    def create_engine_config(self) -> RequestedConfig:
        """Read the model directory and return the checked options; unset options stay unset.

        Raises ConfigError, with the option, its value and a remedy, for an invalid option, and
        ModelError for an invalid model directory.
        """
        # Imported here, because it imports pydantic.
        from dovetail.config.assembly import assemble

        return assemble(self)
