"""The options of an engine, flat, under the names that users of such engines know.

Only names and defaults stand here: values are checked when `create_engine_config` makes the tree.
Standard library only, because `from dovetail import LLM` passes through this module.
"""

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
    """Return the metadata of a field: the line that `--help` shows for it."""
    return {"help": text}


def _explaining(cls: C) -> C:
    """Let the constructor of a dataclass refuse unknown names in our own words."""
    construct = cls.__init__  # type: ignore[misc]  # of this class, not of a subclass
    known = [option.name for option in fields(cls)]

    @functools.wraps(construct)
    def explain(self: object, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise ConfigError(f"Unknown engine option {name!r}.{nearest(name, known)}")
        if not args and "model" not in kwargs:
            raise ConfigError("The option model is missing; give the path of a model directory.")
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
    "auto" and None leave the choice to the engine. Each field's metadata has its line of help.
    Raises ConfigError for an unknown name, with the nearest known one.
    """

    model: str | Path = field(kw_only=False, metadata=_help("Path of a model directory."))
    tokenizer: str | Path | None = field(
        default=None, metadata=_help("Directory of the tokenizer; None: the model's.")
    )
    tokenizer_mode: str | type = field(
        default="auto", metadata=_help('Tokenizer plugin, or "auto".')
    )
    skip_tokenizer_init: bool = field(
        default=False, metadata=_help("Load no tokenizer: token ids in, token ids out.")
    )
    trust_remote_code: bool = field(
        default=False, metadata=_help("Refused when true: no code of a model is ever run.")
    )
    revision: str | None = field(
        default=None, metadata=_help("Refused: models are local directories, not downloads.")
    )
    dtype: str = field(
        default="auto", metadata=_help('"auto", "float32", "bfloat16" or "float16".')
    )
    seed: int = field(
        default=0, metadata=_help("Seed of everything random that has no seed of its own.")
    )
    max_model_len: int | None = field(
        default=None, metadata=_help("Most tokens of a request, output included.")
    )
    hf_overrides: Mapping[str, Any] | None = field(
        default=None,
        metadata=_help("Values over config.json's; here architectures may name a class."),
    )
    served_model_name: str | None = field(
        default=None, metadata=_help("Name told to clients; None: `model`.")
    )
    generation_config: str | Path = field(
        default="auto",
        metadata=_help('Sampling defaults: "auto" (the model\'s), "none", or a path.'),
    )
    override_generation_config: Mapping[str, Any] | None = field(
        default=None, metadata=_help("Values to put over the sampling defaults.")
    )
    enforce_eager: bool = field(
        default=False, metadata=_help("Neither capture graphs nor compile the model.")
    )
    max_logprobs: int = field(
        default=20, metadata=_help("Most logprobs that a request may ask for a position.")
    )
    load_format: str | type = field(
        default="auto", metadata=_help('Weight loader plugin, or "auto" (safetensors).')
    )
    use_tqdm_on_load: bool = field(
        default=True, metadata=_help("Show a progress bar while weights are loaded.")
    )
    block_size: int | None = field(
        default=None, metadata=_help("Tokens of a KV-cache block; None: 16.")
    )
    gpu_memory_utilization: float | None = field(
        default=None,
        metadata=_help("Share of the device's memory to use; None: 0.9, less where it is shared."),
    )
    kv_cache_memory_bytes: int | None = field(
        default=None, metadata=_help("Bytes of the KV cache, instead of a share.")
    )
    num_gpu_blocks_override: int | None = field(
        default=None, metadata=_help("Blocks of the KV cache, not measured.")
    )
    kv_cache_dtype: str = field(
        default="auto", metadata=_help('Dtype of the KV cache; "auto": the model\'s.')
    )
    enable_prefix_caching: bool = field(
        default=True, metadata=_help("Keep full blocks and find them again.")
    )
    max_num_seqs: int | None = field(
        default=None, metadata=_help("Most requests that run at a time; None: 256.")
    )
    max_num_batched_tokens: int | None = field(
        default=None, metadata=_help("Most tokens of a step; None: 2048.")
    )
    enable_chunked_prefill: bool | None = field(
        default=None, metadata=_help("Let prompts run in pieces; None: yes.")
    )
    long_prefill_token_threshold: int = field(
        default=0, metadata=_help("Longest piece of a prompt; 0: no limit.")
    )
    scheduler_cls: str | type = field(
        default="auto", metadata=_help('Scheduler or policy plugin; "auto": fcfs.')
    )
    scheduling_policy: str | type | None = field(
        default=None, metadata=_help("Another name for scheduler_cls.")
    )
    async_scheduling: bool | None = field(
        default=None,
        metadata=_help("Plan a step while the one before it runs; None: as the platform likes."),
    )
    pipeline_depth: int | None = field(
        default=None,
        metadata=_help("Steps in flight, 1 to 4; None: 2 with async_scheduling, otherwise 1."),
    )
    num_lookahead_tokens: int = field(
        default=0, metadata=_help("Most draft tokens of a request in a step; 0: no drafts.")
    )
    max_num_encoder_tokens: int = field(
        default=0, metadata=_help("Most placeholder tokens whose content is encoded in a step.")
    )
    encoder_cache_tokens: int | None = field(
        default=None,
        metadata=_help("Encoder outputs to keep, in tokens; None: max_num_encoder_tokens."),
    )
    admission_timeout_s: float = field(
        default=60.0,
        metadata=_help("Seconds that a request may wait for a grammar or another gate."),
    )
    platform: str | type = field(
        default="auto", metadata=_help("Platform plugin: the kind of machine to run on.")
    )
    worker_cls: str | type = field(default="auto", metadata=_help("Worker plugin."))
    worker_extension_cls: str | type = field(
        default="", metadata=_help("Class whose methods are added to the worker's.")
    )
    executor_backend: str | type = field(
        default="auto", metadata=_help('Executor plugin; "auto": uniproc, or multiproc.')
    )
    distributed_executor_backend: str | type | None = field(
        default=None, metadata=_help("Another name for executor_backend.")
    )
    engine_process: bool = field(
        default=False, metadata=_help("Run the engine core in a process of its own.")
    )
    start_timeout_s: int = field(
        default=600, metadata=_help("Seconds that a phase of the start may take.")
    )
    attention_backend: str | type = field(default="auto", metadata=_help("Attention plugin."))
    linear_method: str | type = field(
        default="auto", metadata=_help("Linear method plugin (packing, quantisation).")
    )
    quantization: str | type | None = field(
        default=None,
        metadata=_help('Quantise on load: "int8", "int4"; another name for linear_method.'),
    )
    ops: str | type = field(
        default="auto", metadata=_help("Op provider plugin (norms, rotary embedding, …).")
    )
    batch_invariant: bool = field(
        default=False,
        metadata=_help("Take only parts that give a request the same bits beside any others."),
    )
    tensor_parallel_size: int = field(default=1, metadata=_help("Workers that share each layer."))
    pipeline_parallel_size: int = field(
        default=1, metadata=_help("Devices that share the layers; only 1 so far.")
    )
    data_parallel_size: int = field(
        default=1, metadata=_help("Copies of the model; only 1 so far.")
    )
    num_threads: int | None = field(
        default=None, metadata=_help("CPU threads of platforms that compute on the CPU.")
    )
    disable_log_stats: bool = field(default=True, metadata=_help("Log no statistics."))
    decision_log: str | Path | None = field(
        default=None, metadata=_help("New file to record what the scheduler decides.")
    )
    stat_loggers: tuple[str | type, ...] = field(
        default=(), metadata=_help("Stat logger plugins, notified of every step.")
    )
    logits_processors: tuple[str | type, ...] = field(
        default=(), metadata=_help("Logits processor plugins, in their order.")
    )
    step_extensions: tuple[str | type, ...] = field(
        default=(), metadata=_help("Step extension plugins, in their order.")
    )
    grammar_backend: str | type | None = field(
        default=None, metadata=_help("Grammar plugin, for requests with structured_output.")
    )
    io_processor: str | type | None = field(
        default=None, metadata=_help("IO processor plugin, for LLM.process.")
    )
    kv_connector: str | type | None = field(
        default=None, metadata=_help("KV connector plugin, which keeps KV blocks elsewhere.")
    )
    kv_transfer_timeout_s: float = field(
        default=30.0,
        metadata=_help("Seconds after which a KV connector's load counts as failed."),
    )
    hooks: tuple[str | type, ...] = field(
        default=(), metadata=_help("Hooks plugins, notified of start, steps, errors and stop.")
    )
    max_prompt_chars: int | None = field(
        default=None,
        metadata=_help("Most characters of a prompt; None: max_model_len * the longest token's."),
    )
    max_id_chars: int = field(
        default=1024, metadata=_help("Most characters of a request_id, salt, tenant or lora_id.")
    )
    max_stop_strings: int = field(default=64, metadata=_help("Most stop strings of a request."))
    max_stop_chars: int = field(default=1024, metadata=_help("Most characters of a stop string."))
    max_bad_words: int = field(default=4096, metadata=_help("Most bad words of a request."))
    max_bad_word_chars: int = field(default=256, metadata=_help("Most characters of a bad word."))
    max_bad_words_chars: int = field(
        default=131_072, metadata=_help("Most characters of all bad words of a request.")
    )
    max_extra_args_bytes: int = field(
        default=65_536, metadata=_help("Most bytes of a request's extra_args.")
    )
    max_prompts: int = field(
        default=1_048_576, metadata=_help("Most prompts in one call of LLM.generate.")
    )
    max_chat_messages: int = field(
        default=4096, metadata=_help("Most messages of a conversation in LLM.chat.")
    )
    plugin_options: Mapping[str, Any] = field(
        default_factory=dict, metadata=_help("Options of plugins, by plugin name.")
    )
    plugins_allow: tuple[str, ...] = field(
        default=(),
        metadata=_help("Outside plugins that may be selected automatically: kind:name@dist."),
    )
    plugins_deny: tuple[str, ...] = field(
        default=(), metadata=_help("Plugins never to use, as kind:name@dist; * for any.")
    )
    no_plugins: bool = field(default=False, metadata=_help("Use first-party plugins only."))
    plugins_strict: bool = field(
        default=False, metadata=_help("Stop where a plugin fails that nobody asked for.")
    )
    trust_local_code: bool = field(
        default=False, metadata=_help("Let plugins be named as ./file.py:Class.")
    )

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineArgs:
        """Return the options named in `kwargs`; raise ConfigError for a name that is none."""
        return cls(**kwargs)

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """Return each option's line of help, by name."""
        return {option.name: option.metadata["help"] for option in fields(cls)}

    def create_engine_config(self) -> RequestedConfig:
        """Read the model directory and return the checked options, open ones still open.

        Raises ConfigError naming option, value and remedy; ModelError for the directory.
        """
        # Late: this is where pydantic comes in.
        from dovetail.config.assembly import assemble

        return assemble(self)
