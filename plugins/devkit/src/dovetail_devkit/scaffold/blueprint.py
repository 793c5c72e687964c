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

_TORCH_LAYER = ("dovetail-torch{core}", "torch>=2.11")


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """What a new package of one kind consists of. `{name}` and the like are filled in.

    summary: what the plugin does, in a sentence. suffix: what its class's name ends with.
    modules: of the package, each from the template of its name; the first holds the plugin.
    entry_points: by kind, "module:Class". roles: the processes that it is for, by kind.
    dependencies: beside the core's. use: how a user chooses it.
    """

    summary: str
    suffix: str
    modules: tuple[str, ...]
    entry_points: Mapping[str, str]
    roles: Mapping[str, tuple[str, ...]]
    dependencies: tuple[str, ...] = ()
    use: str


BLUEPRINTS: Mapping[str, Blueprint] = MappingProxyType(
    {
        "attention": Blueprint(
            summary="Dense paged attention for Dovetail, in plain torch.",
            suffix="AttentionBackend",
            modules=("backend",),
            entry_points={"attention": "backend:{cls}"},
            roles={"attention": ("worker",)},
            dependencies=("torch>=2.11",),
            use='`LLM(model=…, attention_backend="{name}")`',
        ),
        "executor": Blueprint(
            summary="An executor for Dovetail: one worker, in this process, at once.",
            suffix="Executor",
            modules=("executor",),
            entry_points={"executor": "executor:{cls}"},
            roles={"executor": ("engine",)},
            use='`LLM(model=…, executor_backend="{name}")`',
        ),
        "logits_processor": Blueprint(
            summary="A logits processor for Dovetail that bans the tokens a request names.",
            suffix="LogitsProcessor",
            modules=("processor",),
            entry_points={"logits_processor": "processor:{cls}"},
            # The engine checks each request's parameters by the class that the worker makes.
            roles={"logits_processor": ("engine", "worker")},
            dependencies=("torch>=2.11",),
            use='`LLM(model=…, logits_processors=("{name}",))`, and for each request\n'
            '`SamplingParams(extra_args={{"{name}": [13]}})`',
        ),
        "model": Blueprint(
            summary="A small decoder for Dovetail, of the layers of dovetail-torch.",
            suffix="",
            modules=("model",),
            entry_points={"model": "model:{cls}"},
            roles={"model": ("worker",)},
            dependencies=_TORCH_LAYER,
            use='`"architectures": ["{name}"]` in a checkpoint\'s config.json chooses it.',
        ),
        "platform": Blueprint(
            summary="A platform and its worker for Dovetail: torch on the CPU, as a beginning.",
            suffix="Platform",
            modules=("platform", "runtime", "worker"),
            entry_points={"platform": "platform:{cls}", "worker": "worker:{worker_cls}"},
            roles={"platform": ("frontend", "engine", "worker"), "worker": ("worker",)},
            dependencies=_TORCH_LAYER,
            use='`LLM(model=…, platform="{name}")`',
        ),
        "policy": Blueprint(
            summary="The shortest prompt first: a scheduling policy for Dovetail.",
            suffix="Policy",
            modules=("policy",),
            entry_points={"policy": "policy:{cls}"},
            roles={"policy": ("engine",)},
            use='`LLM(model=…, scheduler_cls="{name}")`',
        ),
        "scheduler": Blueprint(
            summary="Round robin: a scheduler for Dovetail that gives each request its turn.",
            suffix="Scheduler",
            modules=("scheduler",),
            entry_points={"scheduler": "scheduler:{cls}"},
            roles={"scheduler": ("engine",)},
            use='`LLM(model=…, scheduler_cls="{name}")`',
        ),
    }
)
"""Every kind that can be begun from a template."""


def get_blueprint(kind: str) -> Blueprint:
    """Return the blueprint of `kind`; raise PluginError naming the kinds that have one."""
    if kind == "worker":
        raise PluginError("A worker comes with its platform: dovetail plugins new platform NAME")
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
