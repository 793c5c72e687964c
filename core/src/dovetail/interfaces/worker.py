"""The contract of a worker: one device that loads a model and executes plans.

Order of calls, each once: `init_device`, `load_model`, `get_model_info`, `get_kv_cache_spec`,
`determine_available_memory`, `initialize_cache`, `compile_or_warm_up_model`; then any number of
`execute_model` followed by `sample_tokens`; then `shutdown`. All calls come from one thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dovetail.interfaces.kv_cache import KVCacheConfig, KVCacheSpec
from dovetail.plan import SchedulerOutput
from dovetail.result import ModelRunnerOutput

if TYPE_CHECKING:
    from dovetail.interfaces.attention import AttentionFacts
    from dovetail.interfaces.engine_config import WorkerConfig
    from dovetail.interfaces.executor import Handle
    from dovetail.interfaces.platform import Platform
    from dovetail.interfaces.plugin_lookup import PluginLookup


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """Constructor arguments of a worker.

    config: the worker's part of the resolved configuration.
    plugins: the registry that loads the worker's plugins (attention, model, ops, …).
    options: validated options of the worker plugin.
    rank: index of the worker in the engine. local_rank: index of the worker on this machine.
        world_size: number of workers.
    rendezvous: URL by which the workers of this engine connect to each other: "file://" in a
        directory that only its owner can access, or "tcp://" on the loopback interface. "" for a
        single worker.
    """

    config: WorkerConfig
    platform: Platform
    plugins: PluginLookup
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    rendezvous: str = ""
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What the engine needs to know about the loaded model.

    vocab_size: width of the logits; token ids must be below it.
    max_model_len: longest sequence that the weights support; 0 for any.
    supported_tasks: "generate", or tasks of `PoolingParams`; the first is the default of a request.
    embedding_size: number of features of an embedding; 0 for models without. embedding_dimensions:
        smaller numbers of features that the model was trained for; () for any.
    whole_prompts: whether a prompt must be computed in one step, as bidirectional attention needs.
    resumes_prompts: whether a prompt may start after tokens that the prefix cache has, because its
        result depends only on the state after its last token.
    """

    vocab_size: int
    max_model_len: int = 0
    supported_tasks: tuple[str, ...] = ("generate",)
    embedding_size: int = 0
    embedding_dimensions: tuple[int, ...] = ()
    whole_prompts: bool = False
    resumes_prompts: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarOutput:
    """The tokens that grammars allow in this step.

    runs: positions in the plan of the scheduled requests that have a grammar.
    bitmask: ceil(vocab_size / 32) little-endian uint32 words for each of these requests; bit 1 for
    an allowed token.
    """

    runs: tuple[int, ...]
    bitmask: bytes


class WorkerBase(ABC):
    """Executes plans on one device.

    A worker that provides "async_output" does not wait for its device: `execute_model` returns
    early, `sample_tokens` returns a handle, and the next plan may arrive before the handle's result
    is read. `result` of the handle may be called from any thread, in any order and repeatedly. It
    raises the errors of the device.

    Contract: The worker stores the state of each request under its batch slot (`row`). `joins` are
    new requests with their batch slots and tokens, and `leaves` are batch slots that become free.
    The worker appends each sampled token. The worker applies leaves, joins and blocks in this order
    before it computes tokens; it applies an empty plan too. The engine never copies, moves or
    clears blocks. The content of a block beyond a request's computed tokens is undefined.

    Drafts. A worker with the capability "drafts" may draft tokens after a sampled token. It keeps
    them until the next plan that contains the request, and reports their number in
    `ModelRunnerOutput.num_drafts`.
    - That plan verifies the first `SchedulerOutput.num_drafts` of them. They are the last tokens
      of the request in that step, which samples after the last known token and after each draft.
    - A draft is accepted if it and all drafts before it equal the tokens sampled at their
      positions.
      The request gains the accepted drafts and the next sampled token: `num_sampled` is 1 +
      accepted. Keys and values of rejected drafts are invalid; later steps overwrite them.
    - If the results of earlier steps are not known yet, the plan assumes the maximum number of
      drafts, and its `starts` assumes that all earlier drafts are accepted. The worker starts at
      the request's first uncomputed token and verifies the drafts that it holds, at most
      `num_drafts`.
    - Drafts change the speed, never the tokens of a request.
    - The drafter may use the request's blocks. They extend `WorkerConfig.num_lookahead_tokens`
      tokens beyond its last computed token, up to the maximum length of the request.

    Sampling. Every worker implements `temperature` and `seed`. `provides` names the other fields of
    `SamplingParams` that it implements, by the ids of `SAMPLING_CAPABILITIES`. The engine rejects a
    request that needs another field. docs/plugins/worker.md defines each field.

    Pooling. If the model's tasks (`ModelInfo.supported_tasks`) are tasks of `PoolingParams`, all
    requests have `pooling_params`. A step that samples for a request returns its pooled result
    (`ModelRunnerOutput.pooled`) instead of a token. The chunks of a prompt may be in several steps,
    unless `ModelInfo.whole_prompts`. A worker without the capability "pooling" has only the task
    "generate".

    Encoders. A worker with the capability "encoder" encodes the content in
    `SchedulerOutput.encoder` before it computes the tokens of the same plan, after it has applied
    `encoder_frees`. It keeps the output until `encoder_frees` names its hash. The model reads the
    output in place of the placeholder tokens of every request with content of that hash.

    provides: ids of the optional capabilities that the class implements, such as "sleep".
    device_types: device types that it supports, torch's names; empty for any.
    """

    CONTRACT: ClassVar[str] = "worker"
    CONTRACT_VERSION: ClassVar[str] = "0.13"
    provides: ClassVar[frozenset[str]] = frozenset()
    device_types: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def __init__(self, context: WorkerContext) -> None:
        """Store `context`. Do not use the device yet."""

    @abstractmethod
    def init_device(self) -> None:
        """Initialize the device. Raise CapacityError or PluginError if it cannot be used."""

    @abstractmethod
    def load_model(self) -> None:
        """Create the model and load its weights. Raise ModelError for an invalid file or weight."""

    @abstractmethod
    def get_model_info(self) -> ModelInfo:
        """Return what the engine needs to know about the loaded model."""

    @abstractmethod
    def get_kv_cache_spec(self) -> Mapping[str, KVCacheSpec]:
        """Return the KV-cache spec of each layer by name, or {} if the model has no cache."""

    @abstractmethod
    def determine_available_memory(self) -> int:
        """Run a step of maximum size and return the bytes that remain for the KV cache."""

    @abstractmethod
    def initialize_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache. Called once, before the first plan.

        `KVCacheGroup.place` gives each layer's offset. The block size of a layer is that of its
        group (`KVCacheGroup.spec`), possibly a multiple of the one from `get_kv_cache_spec`.
        """

    @abstractmethod
    def compile_or_warm_up_model(self) -> None:
        """Compile and warm up, so that the first requests are not slow. Results do not change."""

    @abstractmethod
    def execute_model(self, plan: SchedulerOutput) -> None:
        """Apply the plan and run the model. Keep the logits for `sample_tokens`.

        The plan is read only. The call may return before the device has finished.
        """

    @abstractmethod
    def sample_tokens(
        self, grammar: GrammarOutput | None = None
    ) -> ModelRunnerOutput | Handle[ModelRunnerOutput]:
        """Sample from the logits of the last executed plan and return its result.

        Only workers that provide "async_output" may return a handle.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Release all resources. May be called at any time and more than once."""


class Sleeps(Protocol):
    """Capability "sleep": releases device memory while the engine is idle.

    It is used only with `WorkerConfig.cache.enable_sleep_mode`. The addresses of tensors do not
    change.
    """

    def sleep(self, level: int) -> None:
        """Release memory. Level 1 frees the cache and offloads the weights. Level 2 frees both.

        Raises CapacityError if the host has too little memory; then nothing is released.
        """

    def wake_up(self, tags: tuple[str, ...] = ()) -> None:
        """Allocate the memory of `tags` again: "weights", "kv_cache". Empty for all.

        The weights are restored or, after level 2, loaded; the cache is zeroed. Memory that is
        already allocated stays, so the call can be repeated after an error. Raises CapacityError if
        the device has too little memory, ModelError for an invalid weight.
        """


class DescribesAttention(Protocol):
    """Capability "describes_attention": describes a model's attention before it is loaded."""

    @classmethod
    def describe_attention(cls, context: WorkerContext) -> AttentionFacts | None:
        """Return the attention of the model that `load_model` would create, or None.

        Reads no weights, uses no device and allocates little memory. Raises the errors of
        `load_model` for a model that cannot be created, and AttentionUnknownError if the model must
        be loaded to find out.
        """


class ProvidesModel(Protocol):
    """Capability "model": gives worker extensions access to the model."""

    def get_model(self) -> Any:
        """Return the loaded model, always the same object. In practice a `torch.nn.Module`.

        Call it after `load_model`. Linear layers have the parameters that their linear method keeps
        after packing. A parameter that is changed in place takes effect in the next step.
        """


class Profiles(Protocol):
    """Capability "profile": records a profile on demand."""

    def profile(self, start: bool) -> None:
        """Start or stop recording."""
