"""The contract of an executor: it owns the workers and carries plans to them.

The engine core knows no worker, only this. Execution is asynchronous from the first day: a call
returns a `Handle`, and an executor of depth 2 may be handed the next plan before the first one's
result is taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from dovetail.errors import ContractError
from dovetail.interfaces.kv_cache import KVCacheConfig, KVCacheSpec
from dovetail.interfaces.worker import GrammarOutput, ModelInfo
from dovetail.plan import SchedulerOutput
from dovetail.result import ModelRunnerOutput
from dovetail.value_checks import shorten

if TYPE_CHECKING:
    from dovetail.interfaces.engine_config import ExecutorConfig
    from dovetail.interfaces.platform import Platform
    from dovetail.interfaces.plugin_lookup import PluginLookup

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Handle(Protocol[T_co]):
    """A result that may not be there yet. `concurrent.futures.Future` is one."""

    def done(self) -> bool:
        """Return whether `result` would not wait."""

    def result(self, timeout: float | None = None) -> T_co:
        """Wait for the result, `timeout` seconds at most, and return it or raise its error."""


class Ready(Generic[T]):
    """A handle whose result is there already."""

    __slots__ = ("_value",)

    def __init__(self, value: T) -> None:
        self._value = value

    def done(self) -> bool:
        """Return True."""
        return True

    def result(self, timeout: float | None = None) -> T:
        """Return the result."""
        return self._value


@dataclass(frozen=True, kw_only=True)
class ExecutorContext:
    """All that an executor is made from.

    config: the executor's part of the configuration; its `worker` is each worker's.
    worker_cls: the resolved class of the workers. The executor makes them, late, where they run,
    with `worker_options` as their context's options. options: the executor plugin's own.
    """

    config: ExecutorConfig
    platform: Platform
    plugins: PluginLookup
    worker_cls: type
    options: Mapping[str, object] = field(default_factory=dict)
    worker_options: Mapping[str, object] = field(default_factory=dict)


class Executor(ABC):
    """Owns the workers: as many as `context.config.worker.tensor_parallel_size` says.

    Contract. Plans are executed in the order of the calls. For every `execute_model` there is
    exactly one `sample_tokens` before the next; the result is rank 0's. A worker that provides
    "async_output" gives a handle of its own: its result is what is passed on. A failing worker, or
    such a handle, makes the handle raise; after that the executor is dead, and every later call
    raises EngineDeadError.
    max_concurrent_steps: how many steps may be in flight at a time; 1 to 4, and no more than the
        configuration's `max_concurrent_steps`.
    max_world_size: most workers that it can have.
    takes_callables: whether its workers live in this process, so that an operation may be any
        callable; where they do not, one is a ContractError.
    """

    CONTRACT: ClassVar[str] = "executor"
    CONTRACT_VERSION: ClassVar[str] = "0.5"
    max_concurrent_steps: int = 1
    max_world_size: ClassVar[int] = 1
    takes_callables: ClassVar[bool] = True

    @abstractmethod
    def __init__(self, context: ExecutorContext) -> None:
        """Make the workers, and take them through `init_device` and `load_model`."""

    @abstractmethod
    def collective_rpc(
        self,
        operation: str | Callable[..., Any],
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        unique_reply_rank: int | None = None,
        non_block: bool = False,
    ) -> Any:
        """Call an operation on every worker and return the answers, a list by rank.

        operation: the name of a worker's method, or "pkg.mod:function" for a function that is given
            the worker first; in process also a callable.
        timeout: seconds; an executor that works in the caller's thread cannot keep it.
        unique_reply_rank: return that rank's answer alone; all workers do the work.
        non_block: return a Handle at once, whose result is what would have been returned.
        Across processes arguments and answers are plain data, `dovetail.transport.ndarray.NDArray`
        and the contracts' own dataclasses; a tuple comes as a list.
        Raises TimeoutError after `timeout`, and the late answer is dropped: the executor continues.
        ContractError if no worker knows `operation`, or for a rank that there is not.
        """

    @abstractmethod
    def execute_model(self, plan: SchedulerOutput) -> Handle[None]:
        """Run the model for `plan`."""

    @abstractmethod
    def sample_tokens(self, grammar: GrammarOutput | None = None) -> Handle[ModelRunnerOutput]:
        """Sample for the plan last given to `execute_model`.

        The result is rank 0's. With a KV connector (`WorkerConfig.kv_connector`) and several ranks
        it is what `dovetail.executors.output_aggregator.aggregate_outputs` makes of the results of
        all ranks.
        """

    @abstractmethod
    def check_health(self) -> None:
        """Raise EngineDeadError if a worker cannot go on, StalledError if one shows no life.

        Does not wait, and may be called from any thread.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers. May be called at any time, and twice."""

    def silence_s(self) -> float:
        """Return for how many seconds the quietest worker has shown no life.

        0.0 where that cannot be told from here. May be called from any thread.
        """
        return 0.0

    def get_model_info(self) -> ModelInfo:
        """Return the first worker's model facts."""
        info: ModelInfo = self.collective_rpc("get_model_info", unique_reply_rank=0)
        return info

    def get_kv_cache_specs(self) -> list[Mapping[str, KVCacheSpec]]:
        """Return each worker's specs."""
        specs: list[Mapping[str, KVCacheSpec]] = self.collective_rpc("get_kv_cache_spec")
        return specs

    def determine_available_memory(self) -> int:
        """Return the bytes that every worker has for its cache: the least of them."""
        answers: list[int] = self.collective_rpc("determine_available_memory")
        for answer in answers:
            if type(answer) is not int:
                raise ContractError(
                    f"A worker returned {shorten(answer)} for determine_available_memory; it has "
                    "to return the number of bytes, an int."
                )
        return min(answers)

    def initialize_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Let the workers take the cache's memory, then warm up."""
        self.collective_rpc("initialize_cache", args=(kv_cache_config,))
        self.collective_rpc("compile_or_warm_up_model")
