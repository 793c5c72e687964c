"""Blueprints: what a new package of each kind consists of.

A table. A kind is here when its template passes its suite with nothing edited, which the tests
check for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dovetail.errors import PluginError, nearest
from dovetail.plugin_kinds import KINDS, get_kind

COMMAND = "command"
"""Commands of the command line have an entry point and a template, and no contract."""

_TORCH = "torch>=2.11"
_TORCH_LAYER = ("dovetail-torch{core}", _TORCH)
_TEST = "package/test_conformance"
_TEST_ON_DEVICE = "package/test_on_device"


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """What a new package of one kind consists of. `{name}` and the like are filled in.

    summary: what the plugin does, in a sentence. suffix: what its class's name ends with.
    modules: of the package, each from the template of its name; the first holds the plugin.
    entry_points: by kind, "module:Class". dependencies: beside the core's. use: how a user chooses
    it. test: the template of its test; "" for the kind's own.
    """

    summary: str
    suffix: str
    modules: tuple[str, ...]
    entry_points: Mapping[str, str]
    dependencies: tuple[str, ...] = ()
    use: str
    test: str = ""


BLUEPRINTS: Mapping[str, Blueprint] = MappingProxyType(
    {
        "attention": Blueprint(
            summary="Dense paged attention for Dovetail, in plain torch.",
            suffix="AttentionBackend",
            modules=("backend",),
            entry_points={"attention": "backend:{cls}"},
            dependencies=(_TORCH,),
            use='`LLM(model=…, attention_backend="{name}")`',
            test=_TEST_ON_DEVICE,
        ),
        "executor": Blueprint(
            summary="An executor for Dovetail: one worker, in this process, at once.",
            suffix="Executor",
            modules=("executor",),
            entry_points={"executor": "executor:{cls}"},
            use='`LLM(model=…, executor_backend="{name}")`',
            test=_TEST,
        ),
        "grammar": Blueprint(
            summary="A grammar backend for Dovetail: the allowed tokens of each position.",
            suffix="GrammarBackend",
            modules=("backend",),
            entry_points={"grammar": "backend:{cls}"},
            use='`LLM(model=…, grammar_backend="{name}")`',
            test=_TEST,
        ),
        "hooks": Blueprint(
            summary="Hooks for Dovetail that count what an engine does.",
            suffix="Hooks",
            modules=("hooks",),
            entry_points={"hooks": "hooks:{cls}"},
            use='`LLM(model=…, hooks=("{name}",))`',
            test=_TEST,
        ),
        "io_processor": Blueprint(
            summary="An IO processor for Dovetail: a list of texts in, a list of answers out.",
            suffix="IOProcessor",
            modules=("processor",),
            entry_points={"io_processor": "processor:{cls}"},
            use='`LLM(model=…, io_processor="{name}")`, and `llm.process(["Name a colour."])`',
            test=_TEST,
        ),
        "kv_connector": Blueprint(
            summary="A KV connector for Dovetail that keeps blocks as files in a folder.",
            suffix="KVConnector",
            modules=("connector",),
            entry_points={"kv_connector": "connector:{cls}"},
            dependencies=("pydantic>=2.8,<3", _TORCH),
            use='`LLM(model=…, kv_connector="{name}",\n'
            'plugin_options={{"{name}": {{"path": "/a/folder"}}}})`',
        ),
        "linear_method": Blueprint(
            summary="A linear method for Dovetail: plain weights, multiplied by torch.",
            suffix="LinearMethod",
            modules=("method",),
            entry_points={"linear_method": "method:{cls}"},
            dependencies=(_TORCH,),
            use='`LLM(model=…, linear_method="{name}")`',
            test=_TEST_ON_DEVICE,
        ),
        "logits_processor": Blueprint(
            summary="A logits processor for Dovetail that bans the tokens a request names.",
            suffix="LogitsProcessor",
            modules=("processor",),
            entry_points={"logits_processor": "processor:{cls}"},
            dependencies=(_TORCH,),
            use='`LLM(model=…, logits_processors=("{name}",))`, and for each request\n'
            '`SamplingParams(extra_args={{"{name}": [13]}})`',
        ),
        "model": Blueprint(
            summary="A small decoder for Dovetail, of the layers of dovetail-torch.",
            suffix="",
            modules=("model",),
            entry_points={"model": "model:{cls}"},
            dependencies=_TORCH_LAYER,
            use='`"architectures": ["{name}"]` in a checkpoint\'s config.json chooses it.',
        ),
        "model_format": Blueprint(
            summary="A model format for Dovetail: a file with a configuration, without weights.",
            suffix="ModelFormat",
            modules=("format",),
            entry_points={"model_format": "format:{cls}"},
            use='`LLM(model="a_file.{name}")`',
            test=_TEST,
        ),
        "model_source": Blueprint(
            summary="A model source for Dovetail: the models of one directory, by name.",
            suffix="ModelSource",
            modules=("source",),
            entry_points={"model_source": "source:{cls}"},
            use='`LLM(model="{name}:NAME")`',
            test=_TEST,
        ),
        "ops": Blueprint(
            summary="Operations for Dovetail in plain torch: a norm and an activation.",
            suffix="Ops",
            modules=("ops",),
            entry_points={"ops": "ops:{cls}"},
            dependencies=(_TORCH,),
            use='`LLM(model=…, ops="{name}")`',
            test=_TEST_ON_DEVICE,
        ),
        "platform": Blueprint(
            summary="A platform and its worker for Dovetail: torch on the CPU, as a beginning.",
            suffix="Platform",
            modules=("platform", "runtime", "worker"),
            entry_points={"platform": "platform:{cls}", "worker": "worker:{worker_cls}"},
            dependencies=_TORCH_LAYER,
            use='`LLM(model=…, platform="{name}")`',
        ),
        "policy": Blueprint(
            summary="The shortest prompt first: a scheduling policy for Dovetail.",
            suffix="Policy",
            modules=("policy",),
            entry_points={"policy": "policy:{cls}"},
            use='`LLM(model=…, scheduler_cls="{name}")`',
        ),
        "scheduler": Blueprint(
            summary="Round robin: a scheduler for Dovetail that gives each request its turn.",
            suffix="Scheduler",
            modules=("scheduler",),
            entry_points={"scheduler": "scheduler:{cls}"},
            use='`LLM(model=…, scheduler_cls="{name}")`',
        ),
        "stat_logger": Blueprint(
            summary="A stat logger for Dovetail: a line in Python's log every hundred steps.",
            suffix="StatLogger",
            modules=("logger",),
            entry_points={"stat_logger": "logger:{cls}"},
            use='`LLM(model=…, stat_loggers=("{name}",))`',
            test=_TEST,
        ),
        "step_extension": Blueprint(
            summary="A step extension for Dovetail that raises the logit of a token.",
            suffix="StepExtension",
            modules=("extension",),
            entry_points={"step_extension": "extension:{cls}"},
            dependencies=(_TORCH,),
            use='`LLM(model=…, step_extensions=("{name}",))`, and for each request\n'
            '`SamplingParams(extra_args={{"{name}": 13}})`',
            test=_TEST_ON_DEVICE,
        ),
        "tokenizer": Blueprint(
            summary="A tokenizer for Dovetail: one token for each byte.",
            suffix="Tokenizer",
            modules=("tokenizer",),
            entry_points={"tokenizer": "tokenizer:{cls}"},
            use='`LLM(model=…, tokenizer_mode="{name}")`',
        ),
        "weight_loader": Blueprint(
            summary="A weight loader for Dovetail that reads one safetensors file.",
            suffix="WeightLoader",
            modules=("loader",),
            entry_points={"weight_loader": "loader:{cls}"},
            dependencies=(*_TORCH_LAYER, "safetensors>=0.4"),
            use='`LLM(model=…, load_format="{name}")`',
        ),
        "worker": Blueprint(
            summary="A worker for Dovetail without a model: it repeats the prompt.",
            suffix="Worker",
            modules=("worker",),
            entry_points={"worker": "worker:{cls}"},
            use='`LLM(model=…, worker_cls="{name}")`',
        ),
        "worker_extension": Blueprint(
            summary="A worker extension for Dovetail that reads the cache layout and weights.",
            suffix="WorkerExtension",
            modules=("extension",),
            entry_points={"worker_extension": "extension:{cls}"},
            use='`LLM(model=…, worker_extension_cls="{name}")`, and\n'
            '`llm.llm_engine.collective_rpc("cache_bytes_per_token")`',
            test=_TEST,
        ),
        COMMAND: Blueprint(
            summary="A command for Dovetail's command line that counts plugins.",
            suffix="",
            modules=("command",),
            entry_points={COMMAND: "command:run"},
            dependencies=("cyclopts>=5",),
            use="`dovetail {words}`",
        ),
    }
)
"""Every kind that can be begun from a template."""


def get_blueprint(kind: str) -> Blueprint:
    """Return the blueprint of `kind`; raise PluginError naming the kinds that have one."""
    blueprint = BLUEPRINTS.get(kind)
    if blueprint is not None:
        return blueprint
    if kind in KINDS:
        raise PluginError(
            f"There is no template of a {kind}; there is one of {', '.join(BLUEPRINTS)}.\n"
            f"Its contract stands in {get_kind(kind).contract.partition(':')[0]}."
        )
    raise PluginError(
        f"There is no plugin kind {kind!r}.{nearest(kind, BLUEPRINTS)} "
        f"Kinds with a template: {', '.join(BLUEPRINTS)}."
    )
