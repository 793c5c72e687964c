"""The table of plugin kinds: one row says everything that the engine knows about a kind.

The options and configuration fields, selection, `dovetail plugins`, the conformance kit and the
scaffolds are derived from these rows or tested against them. A new kind is a row here, a contract
in `dovetail.interfaces`, a fake and a suite. Imports no contract and names no plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from dovetail.errors import PluginNotFoundError, nearest

GROUP_PREFIX = "dovetail."
"""The prefix of the entry-point groups of all kinds."""

FRONTEND, ENGINE, WORKER = ROLES = ("frontend", "engine", "worker")
"""The processes that load plugins."""


class Cardinality(StrEnum):
    """How many plugins of a kind an engine has, and what its option accepts."""

    ONE = "one"
    """Exactly one; "auto" leaves the choice to the engine."""
    OPTIONAL = "0 or 1"
    MANY = "any number"
    """Any number, in the order given."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of plugin.

    interface: the class of its contract, in `dovetail.interfaces.<name>`. summary: what it is.
    field: "group.field" of the configuration that names plugins of this kind; "" if nothing selects
        them yet. option: its name among the engine options; "" if the model names the plugin.
    other_options: further names of that option. also_accepts: other kinds whose plugins it names.
    roles: the processes that load it.
    is_probed: whether selection runs the probe of its manifest.
    takes_context: whether it is made from a context, which brings its options; else they are the
        keyword `options`.
    declares: attributes of its classes that are frozensets of names.
    suite, fake: function and class in the kit, `dovetail_devkit.suites.<name>` and `.fakes.<name>`.
    has_template: whether `dovetail plugins new` writes one.
    distribution: a distribution that provides plugins of this kind.
    """

    name: str
    interface: str
    summary: str
    field: str = ""
    option: str = ""
    other_options: tuple[str, ...] = ()
    also_accepts: tuple[str, ...] = ()
    cardinality: Cardinality = Cardinality.ONE
    roles: tuple[str, ...] = ()
    is_probed: bool = False
    takes_context: bool = True
    declares: tuple[str, ...] = ()
    suite: str = ""
    fake: str = ""
    has_template: bool = False
    distribution: str = ""

    @property
    def group(self) -> str:
        """Its entry-point group."""
        return f"{GROUP_PREFIX}{self.name}"

    @property
    def contract(self) -> str:
        """Its contract as "module:Class"."""
        return f"dovetail.interfaces.{self.name}:{self.interface}"

    @property
    def suite_path(self) -> str:
        """Its conformance suite as "module:function"; "" for a sketch."""
        return f"dovetail_devkit.suites.{self.name}:{self.suite}" if self.suite else ""

    @property
    def fake_path(self) -> str:
        """Its fake as "module:Class"; "" for a sketch."""
        return f"dovetail_devkit.fakes.{self.name}:{self.fake}" if self.fake else ""

    @property
    def is_sketch(self) -> bool:
        """Whether its contract has no suite yet, so that its first implementer may change it."""
        return not self.suite

    @property
    def option_text(self) -> str:
        """The option as messages name it, with its other names."""
        return f"{self.option}{''.join(f' ({name})' for name in self.other_options)}"


_ROWS = (
    Kind(
        name="platform",
        interface="Platform",
        summary="a kind of machine",
        field="parallel.platform",
        option="platform",
        roles=ROLES,
        is_probed=True,
        takes_context=False,
        suite="check_platform",
        fake="FakePlatform",
        has_template=True,
        distribution="dovetail-cpu",
    ),
    Kind(
        name="worker",
        interface="WorkerBase",
        summary="a device that executes plans",
        field="parallel.worker_cls",
        option="worker_cls",
        roles=(ENGINE, WORKER),
        is_probed=True,
        declares=("device_types",),
        suite="check_worker",
        fake="FakeWorker",
        has_template=True,
    ),
    Kind(
        name="executor",
        interface="Executor",
        summary="owns the workers and sends them plans",
        field="parallel.executor_backend",
        option="executor_backend",
        other_options=("distributed_executor_backend",),
        roles=(ENGINE,),
        is_probed=True,
        suite="check_executor",
        fake="FakeExecutor",
        has_template=True,
    ),
    Kind(
        name="scheduler",
        interface="SchedulerInterface",
        summary="makes the plan of each step",
        field="scheduler.scheduler_cls",
        option="scheduler_cls",
        other_options=("scheduling_policy",),
        also_accepts=("policy",),
        roles=(ENGINE,),
        suite="check_scheduler",
        fake="FakeScheduler",
        has_template=True,
    ),
    Kind(
        name="policy",
        interface="Policy",
        summary="the order in which the core's scheduler serves requests",
        field="scheduler.scheduler_cls",
        option="scheduler_cls",
        other_options=("scheduling_policy",),
        roles=(ENGINE,),
        takes_context=False,
        suite="check_policy",
        fake="FakePolicy",
        has_template=True,
    ),
    Kind(
        name="attention",
        interface="AttentionBackend",
        summary="attention over a paged KV cache",
        field="compute.attention_backend",
        option="attention_backend",
        roles=(WORKER,),
        is_probed=True,
        suite="check_backend",
        fake="FakeAttentionBackend",
        has_template=True,
        distribution="dovetail-attn-torch",
    ),
    Kind(
        name="model",
        interface="Model",
        summary="a model architecture",
        field="model.architecture",
        roles=(WORKER,),
        suite="check_model",
        fake="FakeModel",
        has_template=True,
        distribution="dovetail-models",
    ),
    Kind(
        name="weight_loader",
        interface="WeightLoader",
        summary="a format of weight files",
        field="load.load_format",
        option="load_format",
        roles=(WORKER,),
        suite="check_weight_loader",
        fake="FakeWeightLoader",
        has_template=True,
    ),
    Kind(
        name="linear_method",
        interface="LinearMethod",
        summary="quantization and packing of weights",
        field="compute.linear_method",
        option="linear_method",
        other_options=("quantization",),
        roles=(ENGINE, WORKER),
        is_probed=True,
        takes_context=False,
        declares=("device_types", "dtypes", "batch_invariant"),
        suite="check_linear_method",
        fake="FakeLinearMethod",
        has_template=True,
    ),
    Kind(
        name="ops",
        interface="Ops",
        summary="norms, rotary embedding, activation",
        field="compute.ops",
        option="ops",
        roles=(WORKER,),
        is_probed=True,
        takes_context=False,
        declares=("device_types", "batch_invariant"),
        suite="check_ops",
        fake="FakeOps",
        has_template=True,
    ),
    Kind(
        name="tokenizer",
        interface="Tokenizer",
        summary="text to token ids and back",
        field="model.tokenizer_mode",
        option="tokenizer_mode",
        roles=(FRONTEND,),
        takes_context=False,
        suite="check_tokenizer",
        fake="ByteTokenizer",
        has_template=True,
    ),
    Kind(
        name="logits_processor",
        interface="LogitsProcessor",
        summary="changes token scores",
        field="extensions.logits_processors",
        option="logits_processors",
        cardinality=Cardinality.MANY,
        roles=(ENGINE, WORKER),
        suite="check_logits_processor",
        fake="FakeLogitsProcessor",
        has_template=True,
    ),
    Kind(
        name="step_extension",
        interface="StepExtension",
        summary="takes part in steps",
        field="extensions.step_extensions",
        option="step_extensions",
        cardinality=Cardinality.MANY,
        roles=(ENGINE, WORKER),
        suite="check_step_extension",
        fake="FakeStepExtension",
        has_template=True,
    ),
    Kind(
        name="io_processor",
        interface="IOProcessor",
        summary="data to prompts, outputs to results",
        field="extensions.io_processor",
        option="io_processor",
        cardinality=Cardinality.OPTIONAL,
        roles=(FRONTEND,),
        suite="check_io_processor",
        fake="FakeIOProcessor",
        has_template=True,
    ),
    Kind(
        name="stat_logger",
        interface="StatLogger",
        summary="receives the statistics of every step",
        field="extensions.stat_loggers",
        option="stat_loggers",
        cardinality=Cardinality.MANY,
        roles=(FRONTEND,),
        suite="check_stat_logger",
        fake="FakeStatLogger",
        has_template=True,
    ),
    Kind(
        name="hooks",
        interface="Hooks",
        summary="is called at start, steps, errors and stop",
        field="extensions.hooks",
        option="hooks",
        cardinality=Cardinality.MANY,
        roles=(FRONTEND,),
        suite="check_hooks",
        fake="FakeHooks",
        has_template=True,
    ),
    Kind(
        name="worker_extension",
        interface="WorkerExtension",
        summary="adds worker methods",
        field="extensions.worker_extension_cls",
        option="worker_extension_cls",
        cardinality=Cardinality.OPTIONAL,
        roles=(ENGINE, WORKER),
        suite="check_worker_extension",
        fake="FakeWorkerExtension",
        has_template=True,
    ),
    Kind(
        name="kv_connector",
        interface="KVConnector",
        summary="stores KV blocks elsewhere",
        field="extensions.kv_connector",
        option="kv_connector",
        cardinality=Cardinality.OPTIONAL,
        roles=(ENGINE, WORKER),
        suite="check_kv_connector",
        fake="FakeKVConnector",
        has_template=True,
    ),
    Kind(
        name="grammar",
        interface="GrammarBackend",
        summary="restricts output to a grammar",
        field="extensions.grammar_backend",
        option="grammar_backend",
        cardinality=Cardinality.OPTIONAL,
        roles=(ENGINE,),
        suite="check_grammar",
        fake="FakeGrammar",
    ),
    Kind(
        name="proposer",
        interface="Proposer",
        summary="proposes draft tokens",
    ),
    Kind(
        name="tool_parser",
        interface="ToolParser",
        summary="finds tool calls in output",
    ),
    Kind(
        name="reasoning_parser",
        interface="ReasoningParser",
        summary="separates reasoning from the answer",
    ),
    Kind(
        name="http_routes",
        interface="HTTPRoutes",
        summary="adds routes to the server",
    ),
    Kind(
        name="compile_backend",
        interface="CompileBackend",
        summary="compiles the forward pass",
        declares=("device_types",),
    ),
)

KINDS: Mapping[str, Kind] = MappingProxyType({kind.name: kind for kind in _ROWS})
"""Every kind by its name."""


def get_kind(name: str) -> Kind:
    """Return the kind called `name`; raise PluginNotFoundError naming the kinds there are."""
    kind = KINDS.get(name)
    if kind is None:
        raise PluginNotFoundError(
            f"There is no plugin kind {name!r}.{nearest(name, KINDS)} Kinds: {', '.join(KINDS)}."
        )
    return kind
