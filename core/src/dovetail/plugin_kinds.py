"""The table of plugin kinds. One row has everything that the engine knows about a kind.

The options and configuration fields, selection, `dovetail plugins`, the conformance kit and the
scaffolds are derived from these rows or tested against them. A new kind is a row here, a contract
in `dovetail.interfaces`, a fake and a suite. This module imports no contract and names no plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from dovetail.errors import PluginNotFoundError, nearest

GROUP_PREFIX = "dovetail."
"""The prefix of the entry-point groups of all kinds."""

NO_PLUGIN = "none"
"""An option with this value disables a plugin that the engine would otherwise select."""

FRONTEND, ENGINE, WORKER = ROLES = ("frontend", "engine", "worker")
"""The processes that load plugins."""


class Cardinality(StrEnum):
    """The number of plugins of a kind in an engine. It determines the type of the option."""

    ONE = "one"
    """An engine has exactly one such plugin; "auto" leaves the choice to the engine."""
    OPTIONAL = "0 or 1"
    MANY = "any number"
    """An engine has any number of such plugins, in the order given."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of plugin.

    interface: the class of its contract, in `dovetail.interfaces.<name>`. summary: a description.
    field: "section.field" of the configuration that names its plugins; "" if no option exists yet.
        The engine option has the name of the field. has_option: False for models, which the
        checkpoint names. other_options: additional names of the option. also_accepts: other kinds
        whose plugins the option accepts.
    roles: the processes that load it. is_probed: whether selection runs the probe of its manifest.
    is_automatic: whether the engine selects an optional plugin if the option is not set; "none"
        prevents it.
    takes_context: whether the constructor takes a context, which includes the options; otherwise
        it takes the keyword `options`. declares: class attributes that are frozensets of names.
    fake: class of the kind's fake in `dovetail_devkit.fakes.<name>`. The kind also has the suite
        `dovetail_devkit.suites.<name>:check_<name>`.
    distribution: a distribution that provides plugins of this kind.
    """

    name: str
    interface: str
    summary: str
    fake: str
    field: str = ""
    has_option: bool = True
    other_options: tuple[str, ...] = ()
    also_accepts: tuple[str, ...] = ()
    cardinality: Cardinality = Cardinality.ONE
    roles: tuple[str, ...] = ()
    is_probed: bool = False
    is_automatic: bool = False
    takes_context: bool = True
    declares: tuple[str, ...] = ()
    distribution: str = ""

    @property
    def group(self) -> str:
        """The entry-point group of the kind."""
        return f"{GROUP_PREFIX}{self.name}"

    @property
    def contract(self) -> str:
        """The contract of the kind as "module:Class"."""
        return f"dovetail.interfaces.{self.name}:{self.interface}"

    @property
    def option(self) -> str:
        """The engine option that selects plugins of the kind, or "" for none."""
        return self.field.rpartition(".")[2] if self.has_option else ""

    @property
    def suite_path(self) -> str:
        """The kind's conformance suite as "module:function"."""
        return f"dovetail_devkit.suites.{self.name}:check_{self.name}"

    @property
    def fake_path(self) -> str:
        """The kind's fake as "module:Class"."""
        return f"dovetail_devkit.fakes.{self.name}:{self.fake}"

    @property
    def option_text(self) -> str:
        """The option and its other names, for messages."""
        return f"{self.option}{''.join(f' ({name})' for name in self.other_options)}"


_ROWS = (
    Kind(
        name="platform",
        interface="Platform",
        summary="describes one type of device and its defaults",
        field="parallel.platform",
        roles=ROLES,
        is_probed=True,
        takes_context=False,
        fake="FakePlatform",
        distribution="dovetail-cpu",
    ),
    Kind(
        name="worker",
        interface="WorkerBase",
        summary="executes plans on a device",
        field="parallel.worker_cls",
        roles=(ENGINE, WORKER),
        is_probed=True,
        declares=("device_types",),
        fake="FakeWorker",
    ),
    Kind(
        name="executor",
        interface="Executor",
        summary="owns the workers and sends them plans",
        field="parallel.executor_backend",
        other_options=("distributed_executor_backend",),
        roles=(ENGINE,),
        is_probed=True,
        fake="FakeExecutor",
    ),
    Kind(
        name="scheduler",
        interface="SchedulerInterface",
        summary="creates the plan of each step",
        field="scheduler.scheduler_cls",
        other_options=("scheduling_policy",),
        also_accepts=("policy",),
        roles=(ENGINE,),
        fake="FakeScheduler",
    ),
    Kind(
        name="policy",
        interface="Policy",
        summary="decides the order in which the core's scheduler serves requests",
        field="scheduler.scheduler_cls",
        other_options=("scheduling_policy",),
        roles=(ENGINE,),
        takes_context=False,
        fake="FakePolicy",
    ),
    Kind(
        name="attention",
        interface="AttentionBackend",
        summary="computes attention over a paged KV cache",
        field="compute.attention_backend",
        roles=(WORKER,),
        is_probed=True,
        fake="FakeAttentionBackend",
        distribution="dovetail-attn-torch",
    ),
    Kind(
        name="model",
        interface="Model",
        summary="implements a model architecture",
        field="model.architecture",
        has_option=False,
        roles=(WORKER,),
        fake="FakeModel",
        distribution="dovetail-models",
    ),
    Kind(
        name="model_source",
        interface="ModelSource",
        summary="finds and downloads models by name",
        roles=(FRONTEND,),
        fake="FakeModelSource",
        distribution="dovetail-demo-model",
    ),
    Kind(
        name="model_format",
        interface="ModelFormat",
        summary="reads the configuration of a model from a single file",
        roles=(FRONTEND,),
        takes_context=False,
        fake="FakeModelFormat",
    ),
    Kind(
        name="weight_loader",
        interface="WeightLoader",
        summary="reads weight files of one format",
        field="load.load_format",
        roles=(WORKER,),
        fake="FakeWeightLoader",
    ),
    Kind(
        name="linear_method",
        interface="LinearMethod",
        summary="stores and applies the weights of linear layers",
        field="compute.linear_method",
        other_options=("quantization",),
        roles=(ENGINE, WORKER),
        is_probed=True,
        takes_context=False,
        declares=("device_types", "dtypes", "batch_invariant", "batch_dependent"),
        fake="FakeLinearMethod",
    ),
    Kind(
        name="ops",
        interface="Ops",
        summary="computes norms, rotary embeddings and activations",
        field="compute.ops",
        roles=(WORKER,),
        is_probed=True,
        takes_context=False,
        declares=("device_types", "dtypes", "batch_invariant", "batch_dependent"),
        fake="FakeOps",
    ),
    Kind(
        name="tokenizer",
        interface="Tokenizer",
        summary="converts text to token ids and back",
        field="model.tokenizer_mode",
        roles=(FRONTEND,),
        takes_context=False,
        fake="ByteTokenizer",
    ),
    Kind(
        name="logits_processor",
        interface="LogitsProcessor",
        summary="changes the logits before sampling",
        field="extensions.logits_processors",
        cardinality=Cardinality.MANY,
        roles=(ENGINE, WORKER),
        fake="FakeLogitsProcessor",
    ),
    Kind(
        name="step_extension",
        interface="StepExtension",
        summary="reads or changes the data of each step",
        field="extensions.step_extensions",
        cardinality=Cardinality.MANY,
        roles=(ENGINE, WORKER),
        fake="FakeStepExtension",
    ),
    Kind(
        name="admission",
        interface="AdmissionGate",
        summary="holds new requests until their resources are ready",
        field="extensions.admission_gates",
        cardinality=Cardinality.MANY,
        roles=(ENGINE,),
        fake="FakeAdmissionGate",
    ),
    Kind(
        name="io_processor",
        interface="IOProcessor",
        summary="converts data to prompts and outputs to results",
        field="extensions.io_processor",
        cardinality=Cardinality.OPTIONAL,
        roles=(FRONTEND,),
        fake="FakeIOProcessor",
    ),
    Kind(
        name="stat_logger",
        interface="StatLogger",
        summary="receives the statistics of every step",
        field="extensions.stat_loggers",
        cardinality=Cardinality.MANY,
        roles=(FRONTEND,),
        fake="FakeStatLogger",
    ),
    Kind(
        name="hooks",
        interface="Hooks",
        summary="is called at startup, in every step, on errors and at shutdown",
        field="extensions.hooks",
        cardinality=Cardinality.MANY,
        roles=(FRONTEND,),
        fake="FakeHooks",
    ),
    Kind(
        name="worker_extension",
        interface="WorkerExtension",
        summary="adds methods to the worker",
        field="extensions.worker_extension_cls",
        cardinality=Cardinality.OPTIONAL,
        roles=(ENGINE, WORKER),
        fake="FakeWorkerExtension",
    ),
    Kind(
        name="kv_connector",
        interface="KVConnector",
        summary="stores KV blocks outside the KV cache and loads them back",
        field="extensions.kv_connector",
        cardinality=Cardinality.OPTIONAL,
        roles=(ENGINE, WORKER),
        fake="FakeKVConnector",
    ),
    Kind(
        name="grammar",
        interface="GrammarBackend",
        summary="restricts output to a grammar",
        field="extensions.grammar_backend",
        cardinality=Cardinality.OPTIONAL,
        roles=(ENGINE,),
        is_probed=True,
        is_automatic=True,
        fake="FakeGrammar",
    ),
    Kind(
        name="http_routes",
        interface="HTTPRoutes",
        summary="adds routes to the server",
        field="extensions.http_routes",
        cardinality=Cardinality.MANY,
        roles=(FRONTEND,),
        fake="FakeHTTPRoutes",
        distribution="dovetail-server",
    ),
    Kind(
        name="tool_parser",
        interface="ToolParser",
        summary="finds tool calls in the generated text",
        field="extensions.tool_parser",
        cardinality=Cardinality.OPTIONAL,
        roles=(FRONTEND,),
        is_automatic=True,
        fake="FakeToolParser",
        distribution="dovetail-parsers",
    ),
    Kind(
        name="reasoning_parser",
        interface="ReasoningParser",
        summary="separates reasoning from the answer",
        field="extensions.reasoning_parser",
        cardinality=Cardinality.OPTIONAL,
        roles=(FRONTEND,),
        is_automatic=True,
        fake="FakeReasoningParser",
        distribution="dovetail-parsers",
    ),
    Kind(
        name="compile_backend",
        interface="CompileBackend",
        summary="compiles the forward pass of a model",
        field="compute.compile_backend",
        roles=(WORKER,),
        is_probed=True,
        declares=("device_types",),
        fake="FakeCompileBackend",
        distribution="dovetail-torch",
    ),
    Kind(
        name="graph_pass",
        interface="GraphPass",
        summary="changes the graph of a model before it is compiled",
        field="compute.compile_passes",
        cardinality=Cardinality.MANY,
        roles=(WORKER,),
        fake="FakeGraphPass",
    ),
)

KINDS: Mapping[str, Kind] = MappingProxyType({kind.name: kind for kind in _ROWS})
"""All plugin kinds by name."""


def get_kind(name: str) -> Kind:
    """Return the kind called `name`. Raise PluginNotFoundError with all kinds if it is unknown."""
    kind = KINDS.get(name)
    if kind is None:
        raise PluginNotFoundError(
            f"There is no plugin kind {name!r}.{nearest(name, KINDS)} Kinds: {', '.join(KINDS)}."
        )
    return kind
