"""A fake worker without a model that checks its caller.

If the caller follows the rules of rows and blocks, the next token depends only on the row's tokens
and seed. If the caller violates a rule, or calls methods in a wrong order, the worker raises
AssertionError. It uses no tensors and no files, and reads only sizes from its context.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from dovetail.interfaces.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from dovetail.interfaces.scheduler import SchedulerLimits
from dovetail.interfaces.worker import GrammarOutput, ModelInfo, WorkerBase, WorkerContext
from dovetail.plan import SchedulerOutput
from dovetail.result import ModelRunnerOutput
from dovetail_devkit.expectation import expect
from dovetail_devkit.rows.model import RowModel

DEFAULT_VOCAB_SIZE = 97
MEMORY_BYTES = 1 << 20

_ONCE = (
    "init_device",
    "load_model",
    "initialize_cache",
    "compile_or_warm_up_model",
)


class LateOutput:
    """The handle to a result, which is ready at the second poll or when the result is requested.

    output: the result. error: an error that `result` raises instead, or None.
    """

    def __init__(self, output: ModelRunnerOutput) -> None:
        self.output = output
        self.error: Exception | None = None
        self._is_done = False

    def done(self) -> bool:
        """Return False at the first call, as if the device were busy, then True."""
        was_done, self._is_done = self._is_done, True
        return was_done

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Return the result."""
        self._is_done = True
        if self.error is not None:
            raise self.error
        return self.output


class FakeWorker(WorkerBase):
    """Executes plans on a `RowModel`, and drafts as many tokens as the configuration allows.

    calls: names of the methods called so far, in order.
    row_model_cls: the class that executes the plans; a test may use a faulty subclass.
    """

    provides = frozenset({"drafts", "encoder", "logprobs", "prompt_logprobs"})
    row_model_cls: ClassVar[type[RowModel]] = RowModel

    def __init__(self, context: WorkerContext) -> None:
        self.calls: list[str] = []
        self._config = context.config

    def init_device(self) -> None:
        """Do nothing: there is no device."""
        self._enter("init_device")

    def load_model(self) -> None:
        """Do nothing, since there is no model."""
        self._enter("load_model")

    def get_model_info(self) -> ModelInfo:
        """Return the vocabulary size of config.json, or 97."""
        self._ask("get_model_info", after="load_model")
        return ModelInfo(vocab_size=self._vocab_size())

    def get_kv_cache_spec(self) -> Mapping[str, KVCacheSpec]:
        """Return the spec of one layer with one head of size 1 in float32."""
        self._ask("get_kv_cache_spec", after="load_model")
        size = self._config.cache.block_size
        spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype="float32")
        return {"layers.0": spec}

    def determine_available_memory(self) -> int:
        """Return a constant number of bytes."""
        self._ask("determine_available_memory", after="load_model")
        return MEMORY_BYTES

    def initialize_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Create the `RowModel`."""
        self._enter("initialize_cache")
        limits = SchedulerLimits(
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            max_model_len=self._config.model.max_model_len,
            num_lookahead_tokens=self._config.num_lookahead_tokens,
            max_num_encoder_tokens=self._config.max_num_encoder_tokens,
            encoder_cache_tokens=self._config.encoder_cache_tokens,
        )
        self.row_model = self.row_model_cls(limits, kv_cache_config, self._vocab_size())

    def compile_or_warm_up_model(self) -> None:
        """Do nothing."""
        self._enter("compile_or_warm_up_model")

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Apply the plan. Raise AssertionError if it violates a rule."""
        self._ask("execute_model", after="compile_or_warm_up_model")
        self.row_model.execute(plan)

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> ModelRunnerOutput:
        """Return the result of the last executed plan."""
        self._ask("sample_tokens", after="execute_model")
        return self.row_model.sample(grammar)

    def shutdown(self) -> None:
        """Record that the worker was shut down."""
        self.calls.append("shutdown")

    def _enter(self, name: str) -> None:
        """Record a call to a method of `_ONCE`. Each is called at most once, in this order."""
        expect(name not in self.calls, f"{name} was called twice")
        index = _ONCE.index(name)
        self._ask(name, after=_ONCE[index - 1] if index else "")

    def _ask(self, name: str, *, after: str) -> None:
        expect("shutdown" not in self.calls, f"{name} was called after shutdown")
        expect(not after or after in self.calls, f"{name} was called before {after}")
        self.calls.append(name)

    def _vocab_size(self) -> int:
        return int(self._config.model.hf_config.get("vocab_size", DEFAULT_VOCAB_SIZE))


class LateFakeWorker(FakeWorker):
    """A fake worker that provides "async_output": the result of each step is a handle."""

    provides = FakeWorker.provides | {"async_output"}

    def sample_tokens(  # type: ignore[override]  # the contract allows it, the base class does not
        self, grammar: GrammarOutput | None = None
    ) -> LateOutput:
        """Return a handle to the result of the last executed plan."""
        return LateOutput(super().sample_tokens(grammar))
