"""The contract of an executor: it owns the workers and sends plans to them.

The engine core accesses workers only through its executor. Execution is asynchronous: a call
returns a `Handle`, and an executor of depth 2 may receive the next plan before the result of the
first was read.
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
    """A result that may not be available yet, such as a `concurrent.futures.Future`."""

    def done(self) -> bool:
        """Return whether `result` would return without waiting."""

    def result(self, timeout: float | None = None) -> T_co:
        """Wait at most `timeout` seconds for the result. Return the result or raise its error."""


class Ready(Generic[T]):
    """A handle whose result is available."""

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
    """Constructor arguments of an executor.

    config: the executor's part of the configuration; `config.worker` is the workers' part.
    worker_cls: the class of the workers. The executor constructs them in the process in which they
        run, with `worker_options` as the options of their context.
    options: validated options of the executor plugin.
    """

    config: ExecutorConfig
    platform: Platform
    plugins: PluginLookup
    worker_cls: type
    options: Mapping[str, object] = field(default_factory=dict)
    worker_options: Mapping[str, object] = field(default_factory=dict)


class Executor(ABC):
    """Owns the workers: `context.config.worker.tensor_parallel_size` of them.

    Contract: Plans are executed in the order of the calls. After each `execute_model`,
    `sample_tokens` is called exactly once before the next `execute_model`. The executor returns the
    result of rank 0. If a worker returns a handle ("async_output"), the executor returns the result
    of that handle. If a worker or its handle fails, the executor's handle raises the error. Every
    later call then raises EngineDeadError.
    max_concurrent_steps: number of steps that may be in flight; 1 to 4, and at most
        `config.max_concurrent_steps`.
    max_world_size: maximum number of workers.
    takes_callables: whether the workers run in this process, so that `collective_rpc` accepts any
        callable. If False, a callable raises ContractError.
    """

    CONTRACT: ClassVar[str] = "executor"
    CONTRACT_VERSION: ClassVar[str] = "0.8"
    max_concurrent_steps: int = 1
    max_world_size: ClassVar[int] = 1
    takes_callables: ClassVar[bool] = True

    @abstractmethod
    def __init__(self, context: ExecutorContext) -> None:
        """Create the workers and call their methods `init_device` and `load_model`."""

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
        """Call an operation on every worker and return the list of results by rank.

        operation: the name of a worker method, or "pkg.mod:function" for a function whose first
            argument is the worker; a callable if `takes_callables`.
        timeout: seconds; ignored by an executor that works in the caller's thread.
        unique_reply_rank: return only the result of this rank; all workers run the operation.
        non_block: return a Handle of the result immediately.
        Between processes, arguments and results are plain data, dataclasses of the contracts and
        `dovetail.transport.ndarray.NDArray`; a tuple arrives as a list.
        Raises TimeoutError after `timeout`; the late result is dropped and the executor continues.
        Raises ContractError if the workers have no such operation or the rank does not exist.
        """

    @abstractmethod
    def execute_model(self, plan: SchedulerOutput) -> Handle[None]:
        """Run the model for `plan`."""

    @abstractmethod
    def sample_tokens(self, grammar: GrammarOutput | None = None) -> Handle[ModelRunnerOutput]:
        """Sample for the last plan of `execute_model`.

        Returns the result of rank 0. With a KV connector (`WorkerConfig.kv_connector`) and several
        ranks, the results of all ranks are combined by
        `dovetail.executors.output_aggregator.aggregate_outputs`.
        """

    @abstractmethod
    def check_health(self) -> None:
        """Raise EngineDeadError if a worker has failed, StalledError if one does not respond.

        Does not wait. May be called from any thread.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the workers. May be called at any time and more than once."""

    def silence_s(self) -> float:
        """Return the longest time in seconds since a worker's last heartbeat.

        0.0 if the workers have no heartbeat. May be called from any thread.
        """
        return 0.0

    def get_model_info(self) -> ModelInfo:
        """Return the `ModelInfo` of rank 0."""
        info: ModelInfo = self.collective_rpc("get_model_info", unique_reply_rank=0)
        return info

    def get_kv_cache_specs(self) -> list[Mapping[str, KVCacheSpec]]:
        """Return the KV-cache specs of each worker."""
        specs: list[Mapping[str, KVCacheSpec]] = self.collective_rpc("get_kv_cache_spec")
        return specs

    def determine_available_memory(self) -> int:
        """Return the bytes available for the KV cache: the minimum over all workers."""
        sizes: list[int] = self.collective_rpc("determine_available_memory")
        for size in sizes:
            if type(size) is not int:
                raise ContractError(
                    f"A worker returned {shorten(size)} for determine_available_memory; it must "
                    "return the number of bytes, an int."
                )
        return min(sizes)

    def initialize_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache in all workers, then warm them up."""
        self.collective_rpc("initialize_cache", args=(kv_cache_config,))
        self.collective_rpc("compile_or_warm_up_model")
