"""The contracts. One file a kind, each documented as law; all of them are 0.x and may still change.

Importing this package imports no tensor library. Contracts grow by fields of their context and
request objects, not by parameters. Each has a fake and a contract suite in `dovetail.testing`.
"""

from dovetail.interfaces.attention import (
    AttentionAsk,
    AttentionBackend,
    AttentionBatch,
    AttentionCapabilities,
    AttentionGroupContext,
    AttentionLayer,
    AttentionLayerContext,
    AttentionMetadataBuilder,
)
from dovetail.interfaces.executor import Executor, ExecutorContext, Handle, Ready
from dovetail.interfaces.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    NoCacheSpec,
)
from dovetail.interfaces.linear_method import LinearMethod, LinearShape
from dovetail.interfaces.model import AttentionContext, Model, ModelContext
from dovetail.interfaces.ops import Ops
from dovetail.interfaces.platform import ConfigPatch, Platform, PlatformInfo, Probe
from dovetail.interfaces.policy import Policy, RequestView, SchedulerView
from dovetail.interfaces.scheduler import (
    Depth,
    EngineCoreOutputs,
    Finished,
    SchedulerContext,
    SchedulerInterface,
    SchedulerLimits,
    SchedulerStats,
)
from dovetail.interfaces.tokenizer import Tokenizer
from dovetail.interfaces.weight_loader import WeightLoader, WeightLoaderContext
from dovetail.interfaces.worker import (
    GrammarOutput,
    ModelInfo,
    Profiles,
    Sleeps,
    WorkerBase,
    WorkerContext,
)

__all__ = [
    "AttentionAsk",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionCapabilities",
    "AttentionContext",
    "AttentionGroupContext",
    "AttentionLayer",
    "AttentionLayerContext",
    "AttentionMetadataBuilder",
    "ConfigPatch",
    "Depth",
    "EngineCoreOutputs",
    "Executor",
    "ExecutorContext",
    "Finished",
    "FullAttentionSpec",
    "GrammarOutput",
    "Handle",
    "KVCacheConfig",
    "KVCacheGroup",
    "KVCacheSpec",
    "LinearMethod",
    "LinearShape",
    "Model",
    "ModelContext",
    "ModelInfo",
    "NoCacheSpec",
    "Ops",
    "Platform",
    "PlatformInfo",
    "Policy",
    "Probe",
    "Profiles",
    "Ready",
    "RequestView",
    "SchedulerContext",
    "SchedulerInterface",
    "SchedulerLimits",
    "SchedulerStats",
    "SchedulerView",
    "Sleeps",
    "Tokenizer",
    "WeightLoader",
    "WeightLoaderContext",
    "WorkerBase",
    "WorkerContext",
]
