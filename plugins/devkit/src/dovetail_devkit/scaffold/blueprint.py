"""Blueprints: the contents of a new plugin package, for each kind that has a template.

The tests check that each template passes the suite of its kind without changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dovetail.errors import PluginError, nearest

COMMAND = "command"
"""The kind for commands of the command line. A command has an entry point but no contract."""

_TORCH = "torch>=2.11"
_TORCH_LAYER = ("dovetail-torch{core}", _TORCH)
_TEST = "package/test_conformance"
_TEST_ON_DEVICE = "package/test_on_device"


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """The contents of a new package of one kind. Names in braces, such as `{name}`, are replaced.

    summary: one sentence about the plugin. suffix: end of the plugin's class name. modules: names
    of the package's modules and of their templates; the first contains the plugin. entry_points:
    kind to "module:Class". dependencies: requirements in addition to dovetail-core. use: how a user
    selects the plugin. test: template of the test; "" for `test_conformance` of the kind.
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
        "admission": Blueprint(
            summary="An admission gate for Dovetail that admits one request in ten milliseconds.",
            suffix="Gate",
            modules=("gate",),
            entry_points={"admission": "gate:{cls}"},
            use='`LLM(model=…, admission_gates=("{name}",))`',
            test=_TEST,
        ),
        "attention": Blueprint(
            summary="Dense paged attention for Dovetail, in ordinary torch code.",
            suffix="AttentionBackend",
            modules=("backend",),
            entry_points={"attention": "backend:{cls}"},
            dependencies=(_TORCH,),
            use='`LLM(model=…, attention_backend="{name}")`',
            test=_TEST_ON_DEVICE,
        ),
        "compile_backend": Blueprint(
            summary="A compile backend for Dovetail that runs the operations of a graph in order.",
            suffix="CompileBackend",
            modules=("backend",),
            entry_points={"compile_backend": "backend:{cls}"},
            dependencies=(_TORCH,),
            use='`LLM(model=…, compile_level="piecewise", compile_backend="{name}")`',
            test=_TEST_ON_DEVICE,
        ),
        "executor": Blueprint(
            summary="An executor for Dovetail that runs one worker in the engine's process.",
            suffix="Executor",
            modules=("executor",),
            entry_points={"executor": "executor:{cls}"},
            use='`LLM(model=…, executor_backend="{name}")`',
            test=_TEST,
        ),
        "grammar": Blueprint(
            summary="A grammar backend for Dovetail that allows a list of tokens at each position.",
            suffix="GrammarBackend",
            modules=("backend",),
            entry_points={"grammar": "backend:{cls}"},
            use='`LLM(model=…, grammar_backend="{name}")`',
            test=_TEST,
        ),
        "graph_pass": Blueprint(
            summary="A graph pass for Dovetail that replaces a division with a multiplication.",
            suffix="GraphPass",
            modules=("graph_pass",),
            entry_points={"graph_pass": "graph_pass:{cls}"},
            dependencies=_TORCH_LAYER,
            use='`LLM(model=…, compile_level="piecewise", compile_passes=("{name}",))`',
            test=_TEST_ON_DEVICE,
        ),
        "hooks": Blueprint(
            summary="Hooks for Dovetail that count steps, tokens and errors of an engine.",
            suffix="Hooks",
            modules=("hooks",),
            entry_points={"hooks": "hooks:{cls}"},
            use='`LLM(model=…, hooks=("{name}",))`',
            test=_TEST,
        ),
        "http_routes": Blueprint(
            summary="HTTP routes for Dovetail that count the tokens of a text.",
            suffix="Routes",
            modules=("routes",),
            entry_points={"http_routes": "routes:{cls}"},
            use="`dovetail serve --model MODEL --http-routes {name}`",
            test=_TEST,
        ),
        "io_processor": Blueprint(
            summary="An IO processor for Dovetail that converts a list of strings to outputs.",
            suffix="IOProcessor",
            modules=("processor",),
            entry_points={"io_processor": "processor:{cls}"},
            use='`LLM(model=…, io_processor="{name}")`, and `llm.process(["Name a color."])`',
            test=_TEST,
        ),
        "kv_connector": Blueprint(
            summary="A KV connector for Dovetail that keeps blocks as files in a directory.",
            suffix="KVConnector",
            modules=("connector",),
            entry_points={"kv_connector": "connector:{cls}"},
            dependencies=("pydantic>=2.8,<3", _TORCH),
            use='`LLM(model=…, kv_connector="{name}",\n'
            'plugin_options={{"{name}": {{"path": "/a/folder"}}}})`',
        ),
        "linear_method": Blueprint(
            summary="A linear method for Dovetail that applies unpacked weights with torch.",
            suffix="LinearMethod",
            modules=("method",),
            entry_points={"linear_method": "method:{cls}"},
            dependencies=(_TORCH,),
            use='`LLM(model=…, linear_method="{name}")`',
            test=_TEST_ON_DEVICE,
        ),
        "logits_processor": Blueprint(
            summary="A logits processor for Dovetail that bans the tokens listed by a request.",
            suffix="LogitsProcessor",
            modules=("processor",),
            entry_points={"logits_processor": "processor:{cls}"},
            dependencies=(_TORCH,),
            use='`LLM(model=…, logits_processors=("{name}",))`, and for each request\n'
            '`SamplingParams(extra_args={{"{name}": [13]}})`',
        ),
        "model": Blueprint(
            summary="A small decoder for Dovetail, built from layers of dovetail-torch.",
            suffix="",
            modules=("model",),
            entry_points={"model": "model:{cls}"},
            dependencies=_TORCH_LAYER,
            use='write `"architectures": ["{name}"]` in the config.json of a checkpoint.',
        ),
        "model_format": Blueprint(
            summary="A model format for Dovetail that reads files without weights.",
            suffix="ModelFormat",
            modules=("format",),
            entry_points={"model_format": "format:{cls}"},
            use='`LLM(model="a_file.{name}")`',
            test=_TEST,
        ),
        "model_source": Blueprint(
            summary="A model source for Dovetail that finds models in one directory.",
            suffix="ModelSource",
            modules=("source",),
            entry_points={"model_source": "source:{cls}"},
            use='`LLM(model="{name}:NAME")`',
            test=_TEST,
        ),
        "ops": Blueprint(
            summary="A norm and an activation for Dovetail, in ordinary torch code.",
            suffix="Ops",
            modules=("ops",),
            entry_points={"ops": "ops:{cls}"},
            dependencies=(_TORCH,),
            use='`LLM(model=…, ops="{name}")`',
            test=_TEST_ON_DEVICE,
        ),
        "platform": Blueprint(
            summary="A platform and a worker for Dovetail that run torch on the CPU.",
            suffix="Platform",
            modules=("platform", "runtime", "worker"),
            entry_points={"platform": "platform:{cls}", "worker": "worker:{worker_cls}"},
            dependencies=_TORCH_LAYER,
            use='`LLM(model=…, platform="{name}")`',
        ),
        "policy": Blueprint(
            summary="A scheduling policy for Dovetail that serves the shortest prompt first.",
            suffix="Policy",
            modules=("policy",),
            entry_points={"policy": "policy:{cls}"},
            use='`LLM(model=…, scheduler_cls="{name}")`',
        ),
        "reasoning_parser": Blueprint(
            summary="A reasoning parser for Dovetail that reads reasoning between two markers.",
            suffix="ReasoningParser",
            modules=("parser",),
            entry_points={"reasoning_parser": "parser:{cls}"},
            use='`LLM(model=…, reasoning_parser="{name}")`, and `llm.chat(messages)`',
            test=_TEST,
        ),
        "scheduler": Blueprint(
            summary="A scheduler for Dovetail that serves requests round robin.",
            suffix="Scheduler",
            modules=("scheduler",),
            entry_points={"scheduler": "scheduler:{cls}"},
            use='`LLM(model=…, scheduler_cls="{name}")`',
        ),
        "stat_logger": Blueprint(
            summary="A stat logger for Dovetail that logs one line every hundred steps.",
            suffix="StatLogger",
            modules=("logger",),
            entry_points={"stat_logger": "logger:{cls}"},
            use='`LLM(model=…, stat_loggers=("{name}",))`',
            test=_TEST,
        ),
        "step_extension": Blueprint(
            summary="A step extension for Dovetail that increases the logit of a token.",
            suffix="StepExtension",
            modules=("extension",),
            entry_points={"step_extension": "extension:{cls}"},
            dependencies=(_TORCH,),
            use='`LLM(model=…, step_extensions=("{name}",))`, and for each request\n'
            '`SamplingParams(extra_args={{"{name}": 13}})`',
            test=_TEST_ON_DEVICE,
        ),
        "tokenizer": Blueprint(
            summary="A tokenizer for Dovetail with one token for each byte.",
            suffix="Tokenizer",
            modules=("tokenizer",),
            entry_points={"tokenizer": "tokenizer:{cls}"},
            use='`LLM(model=…, tokenizer_mode="{name}")`',
        ),
        "tool_parser": Blueprint(
            summary="A tool parser for Dovetail that reads tool calls between two markers.",
            suffix="ToolParser",
            modules=("parser",),
            entry_points={"tool_parser": "parser:{cls}"},
            use='`LLM(model=…, tool_parser="{name}")`, and `llm.chat(messages, tools=[…])`',
            test=_TEST,
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
            summary="A worker for Dovetail without a model, which repeats the prompt.",
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
            summary="A command for Dovetail's command line that counts the installed plugins.",
            suffix="",
            modules=("command",),
            entry_points={COMMAND: "command:run"},
            dependencies=("cyclopts>=5",),
            use="`dovetail {words}`",
        ),
    }
)
"""Map of kind to blueprint, for every kind that has a template."""


def get_blueprint(kind: str) -> Blueprint:
    """Return the blueprint of `kind`. Raise PluginError if the kind has no template."""
    blueprint = BLUEPRINTS.get(kind)
    if blueprint is not None:
        return blueprint
    raise PluginError(
        f"The plugin kind {kind!r} does not exist.{nearest(kind, BLUEPRINTS)} "
        f"Kinds with a template: {', '.join(BLUEPRINTS)}."
    )
