"""The contracts between the engine and its plugins, one module per kind of plugin.

All contracts are 0.x and may still change. New inputs become fields of the context and request
objects, not parameters. `dovetail_devkit` has a fake and a contract suite for each contract.
Importing this package imports no tensor library.
"""

from typing import TYPE_CHECKING

from dovetail.interfaces.admission import AdmissionContext, AdmissionGate
from dovetail.interfaces.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionCapabilities,
    AttentionFacts,
    AttentionGroupContext,
    AttentionLayer,
    AttentionLayerContext,
    AttentionMetadataBuilder,
    AttentionRequirements,
    RotaryArgs,
)
from dovetail.interfaces.compile_backend import CompileBackend, CompileContext, CompileRequest
from dovetail.interfaces.executor import Executor, ExecutorContext, Handle, Ready
from dovetail.interfaces.grammar import GrammarBackend, GrammarContext, GrammarMatcher, GrammarSpec
from dovetail.interfaces.graph_pass import GraphPass, GraphPassContext
from dovetail.interfaces.hooks import Hooks, HooksContext, HookSpecs
from dovetail.interfaces.http_routes import (
    HTTPRequest,
    HTTPResponse,
    HTTPRoute,
    HTTPRoutes,
    HTTPRoutesContext,
)
from dovetail.interfaces.io_processor import (
    IOBatch,
    IOProcessor,
    IOProcessorContext,
    IOPrompt,
    IORequest,
    IOResult,
)
from dovetail.interfaces.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    LatentAttentionSpec,
    NoCacheSpec,
    StateSpec,
)
from dovetail.interfaces.kv_connector import (
    KVConnector,
    KVConnectorContext,
    KVOutcome,
    KVSchedulerSide,
    KVTransfer,
    KVWorkerSide,
)
from dovetail.interfaces.linear_method import LinearMethod, LinearShape
from dovetail.interfaces.logits_processor import LogitsProcessor, LogitsProcessorContext
from dovetail.interfaces.model import (
    ONE_RANK,
    AttentionContext,
    LayerState,
    Model,
    ModelContext,
    OneRank,
    RankGroup,
    StateTensor,
    WeightMapping,
)
from dovetail.interfaces.model_format import ModelDescription, ModelFormat
from dovetail.interfaces.model_source import LocalModel, ModelSource, ModelSourceContext
from dovetail.interfaces.ops import Ops
from dovetail.interfaces.platform import ConfigPatch, Platform, PlatformInfo, Probe
from dovetail.interfaces.policy import (
    CONTINUE,
    Action,
    ActionKind,
    Denied,
    Evict,
    Grant,
    Hold,
    Policy,
    PreemptAndAdmit,
    RequestView,
    Run,
    SchedulerView,
)
from dovetail.interfaces.reasoning_parser import (
    ReasoningDelta,
    ReasoningMarkers,
    ReasoningParser,
    ReasoningParserContext,
)
from dovetail.interfaces.sampling_support import (
    FULL_SAMPLING,
    SAMPLING_CAPABILITIES,
    missing_capability,
)
from dovetail.interfaces.scheduler import (
    Depth,
    EngineCoreOutputs,
    Finished,
    PauseScope,
    SchedulerContext,
    SchedulerInterface,
    SchedulerLimits,
    SchedulerStats,
)
from dovetail.interfaces.stat_logger import StatLogger, StatLoggerContext, StepStats
from dovetail.interfaces.step_extension import (
    ExtensionBatch,
    StepExtension,
    StepExtensionContext,
)
from dovetail.interfaces.tokenizer import Tokenizer, TokenPieces
from dovetail.interfaces.tool_parser import (
    CallText,
    ToolCallDelta,
    ToolDelta,
    ToolParser,
    ToolParserContext,
)
from dovetail.interfaces.weight_loader import WeightLoader, WeightLoaderContext
from dovetail.interfaces.worker import (
    GrammarOutput,
    ModelInfo,
    Profiles,
    ProvidesModel,
    Sleeps,
    WorkerBase,
    WorkerContext,
)
from dovetail.interfaces.worker_extension import WorkerExtension
from dovetail.retired_names import reject_retired

__all__ = [
    "CONTINUE",
    "FULL_SAMPLING",
    "ONE_RANK",
    "SAMPLING_CAPABILITIES",
    "Action",
    "ActionKind",
    "AdmissionContext",
    "AdmissionGate",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionCapabilities",
    "AttentionContext",
    "AttentionFacts",
    "AttentionGroupContext",
    "AttentionLayer",
    "AttentionLayerContext",
    "AttentionMetadataBuilder",
    "AttentionRequirements",
    "CallText",
    "CompileBackend",
    "CompileContext",
    "CompileRequest",
    "ConfigPatch",
    "Denied",
    "Depth",
    "EngineCoreOutputs",
    "Evict",
    "Executor",
    "ExecutorContext",
    "ExtensionBatch",
    "Finished",
    "FullAttentionSpec",
    "GrammarBackend",
    "GrammarContext",
    "GrammarMatcher",
    "GrammarOutput",
    "GrammarSpec",
    "Grant",
    "GraphPass",
    "GraphPassContext",
    "HTTPRequest",
    "HTTPResponse",
    "HTTPRoute",
    "HTTPRoutes",
    "HTTPRoutesContext",
    "Handle",
    "Hold",
    "HookSpecs",
    "Hooks",
    "HooksContext",
    "IOBatch",
    "IOProcessor",
    "IOProcessorContext",
    "IOPrompt",
    "IORequest",
    "IOResult",
    "KVCacheConfig",
    "KVCacheGroup",
    "KVCacheSpec",
    "KVConnector",
    "KVConnectorContext",
    "KVOutcome",
    "KVSchedulerSide",
    "KVTransfer",
    "KVWorkerSide",
    "LatentAttentionSpec",
    "LayerState",
    "LinearMethod",
    "LinearShape",
    "LocalModel",
    "LogitsProcessor",
    "LogitsProcessorContext",
    "Model",
    "ModelContext",
    "ModelDescription",
    "ModelFormat",
    "ModelInfo",
    "ModelSource",
    "ModelSourceContext",
    "NoCacheSpec",
    "OneRank",
    "Ops",
    "PauseScope",
    "Platform",
    "PlatformInfo",
    "Policy",
    "PreemptAndAdmit",
    "Probe",
    "Profiles",
    "ProvidesModel",
    "RankGroup",
    "Ready",
    "ReasoningDelta",
    "ReasoningMarkers",
    "ReasoningParser",
    "ReasoningParserContext",
    "RequestView",
    "RotaryArgs",
    "Run",
    "SchedulerContext",
    "SchedulerInterface",
    "SchedulerLimits",
    "SchedulerStats",
    "SchedulerView",
    "Sleeps",
    "StatLogger",
    "StatLoggerContext",
    "StateSpec",
    "StateTensor",
    "StepExtension",
    "StepExtensionContext",
    "StepStats",
    "TokenPieces",
    "Tokenizer",
    "ToolCallDelta",
    "ToolDelta",
    "ToolParser",
    "ToolParserContext",
    "WeightLoader",
    "WeightLoaderContext",
    "WeightMapping",
    "WorkerBase",
    "WorkerContext",
    "WorkerExtension",
    "missing_capability",
]

if not TYPE_CHECKING:  # a type checker reports an unknown name itself
    __getattr__ = reject_retired(__name__)
