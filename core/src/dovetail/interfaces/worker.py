"""The contract of a worker: one device that loads a model and executes plans.

Life, in this order, each once: `init_device`, `load_model`, `get_model_info`, `get_kv_cache_spec`,
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
    """All that a worker is made from.

    config: what the user's configuration says about the worker's part of the engine.
    plugins: resolves the names of the worker's own parts (attention, model, ops, …).
    options: the worker plugin's own, validated.
    rank: place in the whole engine; local_rank: on this machine; world_size: how many there are.
    rendezvous: URL at which the workers of this engine find each other, and nobody else does:
    "file://" in a folder of its owner's alone, or "tcp://" on the loopback. "" if there is one.
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
    """What the engine has to know of the loaded model.

    vocab_size: width of the logits; token ids are held against it.
    max_model_len: longest sequence the weights were made for; 0 for any.
    supported_tasks: "generate", "embed", …
    """

    vocab_size: int
    max_model_len: int = 0
    supported_tasks: tuple[str, ...] = ("generate",)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarOutput:
    """Which tokens grammars allow in this step.

    runs: indices of the plan's runs that are constrained.
    bitmask: little-endian uint32 words, ceil(vocab_size / 32) a run, bit 1 for an allowed token.
    """

    runs: tuple[int, ...]
    bitmask: bytes


class WorkerBase(ABC):
    """Executes plans on one device.

    A worker whose `provides` has "async_output" gives its device the work of a step and does not
    wait for it: `execute_model` returns early, `sample_tokens` returns a handle, and the next plan
    may come before that handle's result was taken. Its `result` may be called from any thread, in
    any order and again; what went wrong on the device is raised there.

    Contract. State is kept per row: `joins` give a row its tokens, each sampled token is appended
    to its row by the worker itself, and `leaves` end a row. A worker applies leaves, joins, blocks
    and runs, in that order; an empty plan is applied too. Blocks are never copied, moved or cleared
    by the engine; what a block holds beyond a row's computed tokens is undefined.

    Drafts. A worker may draft what comes after a sampled token. It keeps the drafts, and tells in
    `ModelRunnerOutput.num_drafts` how many a row holds; they last until the row's next run. That
    run verifies the first `SchedulerOutput.num_drafts` of them: they are its last tokens, and it
    samples after the last known token and after each draft. A plan may be made before the results
    of the row's earlier runs are known. Then it allows for as many drafts as there can be, and its
    `starts` is right if all drafts before were: the worker begins where the row is computed up to,
    and verifies the drafts that it holds, at most so many. Drafts are accepted from the first
    on, as long as each is what was sampled in its place; the row gets them and the token after
    them, so `num_sampled` is 1 + accepted. The row is then computed up to its last token but one:
    what was written for the other drafts is void and written over by later runs. Drafts change
    speed and never which tokens come out. Whatever drafting itself keeps in the cache goes into
    blocks that the row has: those reach `WorkerConfig.num_lookahead_tokens`, the most drafts of a
    row, beyond the row's last run, as far as the request may grow. A worker without the capability
    "drafts" is never asked to verify.

    Sampling. Every worker does `temperature` and `seed`, and names in `provides` which other fields
    of `SamplingParams` it does, by the ids of `SAMPLING_CAPABILITIES`; a request that needs another
    is refused before it reaches a worker. docs/plugins/worker.md says what each field means.

    Encoders. `SchedulerOutput.encoder` names content of rows that is to be encoded before the runs
    of the same plan; its output is kept until `encoder_frees` names its hash, and is what the
    model reads in place of the placeholder tokens, in this plan and later ones, for every row
    with content of that hash. Frees come before encoder runs. A worker without the capability
    "encoder" is never asked.
    provides: capability ids of the optional contracts that the class implements, such as "sleep".
    device_types: the devices that it computes on, as tensors are told them; empty for any.
    """

    CONTRACT: ClassVar[str] = "worker"
    CONTRACT_VERSION: ClassVar[str] = "0.8"
    provides: ClassVar[frozenset[str]] = frozenset()
    device_types: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def __init__(self, context: WorkerContext) -> None:
        """Keep `context`; touch no device yet."""

    @abstractmethod
    def init_device(self) -> None:
        """Take the device. Raise CapacityError or PluginError with the reason if it cannot."""

    @abstractmethod
    def load_model(self) -> None:
        """Make the model and load its weights. Raise ModelError naming file or weight."""

    @abstractmethod
    def get_model_info(self) -> ModelInfo:
        """Return the facts of the loaded model."""

    @abstractmethod
    def get_kv_cache_spec(self) -> Mapping[str, KVCacheSpec]:
        """Return what each layer keeps, by layer name; empty if the model keeps nothing."""

    @abstractmethod
    def determine_available_memory(self) -> int:
        """Return the bytes left for the KV cache, measured by a run of the largest step."""

    @abstractmethod
    def initialize_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Take the cache's memory. Called once, before the first plan.

        A layer has the block size of its group (`KVCacheGroup.spec`), which may be a multiple of
        the one that `get_kv_cache_spec` returned, and its place in the memory (`place`).
        """

    @abstractmethod
    def compile_or_warm_up_model(self) -> None:
        """Do now whatever would make the first requests slow. Leaves no trace in any result."""

    @abstractmethod
    def execute_model(self, plan: SchedulerOutput) -> None:
        """Apply the plan and run the model; keep the logits for `sample_tokens`.

        The plan is only read. The call may return before the device is done.
        """

    @abstractmethod
    def sample_tokens(
        self, grammar: GrammarOutput | None = None
    ) -> ModelRunnerOutput | Handle[ModelRunnerOutput]:
        """Sample from the logits of the plan just executed and return its result.

        A handle comes only from workers that provide "async_output".
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Give everything back. May be called at any time, and twice."""


class Sleeps(Protocol):
    """Capability "sleep": gives memory back while idle."""

    def sleep(self, level: int) -> None:
        """Level 1 drops the cache and sets the weights aside; level 2 drops both."""

    def wake_up(self, tags: tuple[str, ...] = ()) -> None:
        """Take the memory named by `tags` ("weights", "kv_cache"; empty: all) again."""


class DescribesAttention(Protocol):
    """Capability "describes_attention": says what a model asks of attention before it is loaded."""

    @classmethod
    def describe_attention(cls, context: WorkerContext) -> AttentionFacts | None:
        """Return what the layers that `load_model` would make ask; None for no attention.

        Opens no weights, takes no device and no memory to speak of. Raises as `load_model` for a
        model that cannot be made, and AttentionUnknownError where only loading it can tell.
        """


class ProvidesModel(Protocol):
    """Capability "model": lets worker extensions reach the model."""

    def get_model(self) -> Any:
        """Return the loaded model, always the same object; in practice a `torch.nn.Module`.

        To be called after `load_model`. The parameters of a linear layer are those that its linear
        method keeps after packing. A change of a parameter in place holds from the next step on.
        """


class Profiles(Protocol):
    """Capability "profile": records a profile on demand."""

    def profile(self, start: bool) -> None:
        """Start or stop recording."""
