"""The worker of every torch device: it selects plugins, loads the model and runs plans.

`Platform.runtime()` handles the differences between devices; plugins are selected by name, through
the plugin registry.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from dovetail.errors import (
    AttentionUnknownError,
    PluginLoadError,
)
from dovetail.interfaces import (
    FULL_SAMPLING,
    AttentionBackend,
    AttentionFacts,
    AttentionMetadataBuilder,
    GrammarOutput,
    KVCacheConfig,
    KVCacheSpec,
    ModelContext,
    ModelInfo,
    OneRank,
    WeightLoader,
    WeightLoaderContext,
    WorkerBase,
    WorkerContext,
)
from dovetail.plan import SchedulerOutput
from dovetail.plugins.architecture import load_architecture
from dovetail.plugins.attention_requirements import attention_requirements
from dovetail.plugins.construction import Options, construct
from dovetail.plugins.selection import AUTO, choose, choose_attention
from dovetail_torch.batch_invariance import BatchInvariance
from dovetail_torch.checks import check_device, read_vocab_size
from dovetail_torch.compilation.setup import Compilation, make_compilation
from dovetail_torch.device_runtime import runtime_of
from dovetail_torch.distributed.joining import check_shared, join_ranks
from dovetail_torch.graph_provider import GraphProvider
from dovetail_torch.graphs.capture import GraphCapture
from dovetail_torch.graphs.plan import GraphOptions
from dovetail_torch.layers import CompletedOps, pack_linears
from dovetail_torch.layers.attention import (
    Attention,
    CacheLayer,
    add_kv_scales,
    attention_facts,
    attention_layers,
    cache_layers,
    replicate_kv_heads,
)
from dovetail_torch.lazy_memory import lazy_zeros
from dovetail_torch.making_extensions import make_extensions
from dovetail_torch.memory_budget import bytes_for_cache
from dovetail_torch.meta_model import fails_on_any_device
from dovetail_torch.out_of_memory import explain_oom
from dovetail_torch.pooling.making import adapt_model, make_head, pooling_info
from dovetail_torch.pooling.pooling_runner import PoolingRunner
from dovetail_torch.positions import PositionTables, check_last_position, limit_positions
from dovetail_torch.profiling import Profiler
from dovetail_torch.quantization.inner_method import with_inner_method
from dovetail_torch.runner.connected_runner import ConnectedRunner, make_worker_side
from dovetail_torch.runner.device_parts import DeviceParts
from dovetail_torch.runner.kv_cache import kv_cache_specs, make_attention, make_builders
from dovetail_torch.runner.loaded_model import LoadedModel
from dovetail_torch.runner.model_runner import ModelRunner
from dovetail_torch.runner.step_limits import StepLimits
from dovetail_torch.runner.step_outputs import Output
from dovetail_torch.weights.finiteness import check_finite

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_RELEASED = ("runner", "extensions", "loaded", "model", "layers", "attention_layers", "ranks")
_SMALLER_MODEL = "choose a smaller model or dtype, or quantization"
_SMALLER_STEP = "lower max_num_batched_tokens or max_num_seqs"
_SMALLER_CACHE = "lower gpu_memory_utilization, kv_cache_memory_bytes or num_gpu_blocks_override"


class TorchWorker(WorkerBase):
    """One torch device with a model, or with one rank's part of a shared model."""

    provides = FULL_SAMPLING | {
        "compile",
        "describes_attention",
        "kv_connector",
        "logits_processors",
        "model",
        "pooling",
        "profile",
        "step_extensions",
    }

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._runtime = runtime_of(context.platform, type(self))
        self._profiler = Profiler()
        self._compilation: Compilation | None = None

    def init_device(self) -> None:
        """Activate the device and join the other ranks, if there are any."""
        config = self._context.config
        self._device = self._runtime.activate(
            self._context.local_rank, num_threads=config.compute.num_threads
        )
        torch.set_float32_matmul_precision(config.compute.matmul_precision)
        self._limits = StepLimits.of(config, self._device)
        self._ranks = join_ranks(self._context, self._runtime, self._device)

    @classmethod
    def describe_attention(cls, context: WorkerContext) -> AttentionFacts | None:
        """Return the attention requirements of the layers of a model on the device "meta".

        None if the model has no attention. Raises the errors of `load_model` for a model that
        cannot be created, and AttentionUnknownError for a model that only the device "meta" cannot
        create.
        """
        worker = cls(context)
        worker._device = torch.device("meta")
        worker._limits = StepLimits.of(context.config, worker._device)
        worker._ranks = OneRank(size=context.world_size)
        try:
            with torch.device("meta"):
                worker._make_model()
        except PluginLoadError as error:
            if error.__cause__ is None or fails_on_any_device(error.__cause__):
                raise
            raise AttentionUnknownError(
                "the model cannot be created on the device 'meta', which has no memory for "
                f"weights: {error}"
            ) from error
        layers = worker._attention_layers
        return attention_facts(layers.values()) if layers else None

    def _make_model(self) -> None:
        """Create the uninitialized model, and find its attention layers."""
        plugins, config = self._context.plugins, self._context.config
        self._invariance = BatchInvariance(
            config.model.dtype, required=config.compute.batch_invariant
        )
        model_cls = load_architecture(plugins, config)
        check_shared(model_cls, self._ranks)
        context = self._model_context(plugins.options_of("model", model_cls))
        self._model: Any = construct("model", model_cls, context)
        adapt_model(self._model, config)
        self._limits = limit_positions(self._model, self._limits)
        replicate_kv_heads(self._model, self._ranks)
        self._layers: dict[str, CacheLayer] = dict(cache_layers(self._model))
        self._attention_layers: dict[str, Attention] = dict(attention_layers(self._model))
        self._has_states = len(self._attention_layers) < len(self._layers)
        if config.cache.kv_cache_scales == "layer":
            add_kv_scales(self._attention_layers.values(), self._device)

    @explain_oom("the model", _SMALLER_MODEL)
    @torch.inference_mode()
    def load_model(self) -> None:
        """Create the model of the checkpoint's architecture, then load and pack its weights."""
        self._make_model()
        # The backend is selected before loading, so that an unsuitable backend is rejected
        # immediately.
        self._backend = self._choose_attention() if self._attention_layers else None
        ops_cls = type(self._ops.provider)
        self._invariance.add_attention(self._backend, self._attention_layers.values(), ops_cls)
        self._invariance.add_activations(ops_cls, self._model.modules())
        if self._has_states:
            self._invariance.add_states(ops_cls, self._ranks, self._layers.values())
        num_bytes = self.load_weights(self._model, self._make_loader())
        self._model.eval()
        check_last_position(self._model, self._limits, len(self._layers))
        attention = self._backend.name if self._backend else "none"
        logger.info("Loaded %.2f GiB; attention backend: %s.", num_bytes / _GIB, attention)
        self._invariance.add_ranks(self._ranks)
        if self._context.rank == 0:
            self._invariance.report()
        self._pooler = make_head(self._model, self._context.config, self._limits, len(self._layers))
        self._loaded = LoadedModel(
            model=self._model,
            num_layers=len(self._layers),
            vocab_size=read_vocab_size(self._context.config.model.hf_config),
            limits=self._limits,
            tables=PositionTables(self._model),
            device_parts=self._device_parts(),
            head=self._pooler,
        )
        self._extensions = make_extensions(self._context, self._loaded)

    def _make_loader(self) -> WeightLoader:
        """Return a weight loader of the model's files."""
        plugins, config = self._context.plugins, self._context.config
        loader_cls = plugins.load("weight_loader", config.load.load_format)
        context = WeightLoaderContext(
            model_dir=config.model.model_dir,
            seed=config.model.seed,
            progress=config.load.use_tqdm_on_load,
            quantization=config.model.quantization,
            options=plugins.options_of("weight_loader", loader_cls),
        )
        loader: WeightLoader = loader_cls(context)
        return loader

    def load_weights(self, model: nn.Module, loader: WeightLoader) -> int:
        """Load and pack the weights of `model`, and return the bytes read.

        A platform's worker may override it. Raises WeightError, also for NaN and infinities.
        """
        num_bytes = loader.load(model)
        check_finite(model)
        pack_linears(model)
        return num_bytes

    def graph_provider(self) -> GraphProvider | None:
        """Return the provider that captures and replays steps; a platform's worker overrides it."""
        return None

    def graph_capture(self) -> GraphCapture | None:
        """Return the object that captures graphs on an asynchronous device, or None."""
        return None

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed memory for the KV cache, uint8; a platform's worker may override it."""
        return lazy_zeros((num_bytes,), torch.uint8, self._device)

    def get_model(self) -> nn.Module:
        """Return the loaded model."""
        model: nn.Module = self._model
        return model

    def get_model_info(self) -> ModelInfo:
        """Return the properties of the loaded model."""
        maximum = getattr(self._model, "max_positions", None) or 0
        info = ModelInfo(
            vocab_size=read_vocab_size(self._context.config.model.hf_config), max_model_len=maximum
        )
        return pooling_info(info, self._pooler, self._model)

    def get_kv_cache_spec(self) -> Mapping[str, KVCacheSpec]:
        """Return the KV-cache spec of each attention layer and each recurrent layer."""
        block_size = self._context.config.cache.block_size
        return kv_cache_specs(
            self._backend, self._layers, block_size=block_size, limits=self._limits
        )

    @explain_oom("running a step of the maximum size", _SMALLER_STEP)
    def determine_available_memory(self) -> int:
        """Run a step of the largest size and return the unused bytes of the memory budget."""
        runtime, limits = self._runtime, self._limits
        num_tokens = limits.max_num_batched_tokens
        num_run = min(num_tokens, runtime.max_profile_tokens())
        runtime.reset_peak()
        # They exist for the engine's lifetime: their workspaces are part of the peak.
        builders = self._trial_builders()
        self._loaded.dummy_run(num_run, min(num_run, limits.max_num_seqs))
        del builders
        runtime.synchronize()
        step_bytes = runtime.peak_bytes() * num_tokens // num_run
        share = self._context.config.cache.gpu_memory_utilization
        return bytes_for_cache(runtime, share, step_bytes)

    def _trial_builders(self) -> list[AttentionMetadataBuilder]:
        """Return the metadata builders of an asynchronous device, which allocates all memory."""
        if self._loaded.device_parts.asynchronous is None:
            return []
        specs = self.get_kv_cache_spec()
        options = self._context.plugins.options_of("attention", self._backend)
        return make_builders(self._backend, specs.values(), self._limits, options=options)

    @explain_oom("the KV cache", _SMALLER_CACHE)
    def initialize_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache and create the model runner."""
        attention = make_attention(
            self._backend,
            self._layers,
            kv_cache_config,
            self._limits,
            options=self._context.plugins.options_of("attention", self._backend),
            zeros=self.zeros,
        )
        loaded = self._loaded
        self._compilation = make_compilation(
            self._context, loaded, attention.table, self._compile_failure_reason()
        )
        if self._compilation is not None:
            loaded = replace(loaded, model=self._compilation.model)
        arguments = loaded, attention, self._extensions
        if self._pooler is not None:
            self._runner = PoolingRunner(loaded, attention, self._pooler)
        elif self._context.config.kv_connector is None:
            self._runner = ModelRunner(*arguments)
        else:
            side = make_worker_side(self._context, kv_cache_config)
            self._runner = ConnectedRunner(*arguments, side=side)

    @explain_oom("a first step", _SMALLER_STEP)
    def compile_or_warm_up_model(self) -> None:
        """Compile the model, and run every kernel of the first steps once."""
        if self._compilation is not None:
            self._compilation.run(self._runner.run_sizes, self._device)
        self._runner.warm_up()
        self._runtime.synchronize()

    def compile_failure_reason(self) -> str:
        """Return why torch.compile cannot be used; a platform's worker may override it."""
        return ""

    def _compile_failure_reason(self) -> str:
        if self._has_states:
            return "models with recurrent layers, such as linear attention, are not compiled"
        return self.compile_failure_reason()

    def get_compile_report(self) -> dict[str, Any] | None:
        """Return counts and times of the compilation (`CompileReport`), or None without one."""
        return None if self._compilation is None else asdict(self._compilation.report)

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Apply the plan and run the model."""
        self._runner.execute_model(plan)

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> Output:
        """Sample from the logits of the last executed plan."""
        return self._runner.sample_tokens(grammar)

    def profile(self, start: bool) -> None:
        """Start or stop recording a profile; see `dovetail_torch.profiling`."""
        if start:
            self._profiler.start()
        else:
            logger.info("The profile is in %s.", self._profiler.stop())

    def shutdown(self) -> None:
        """Release weights and cache."""
        runner: ModelRunner | None = self.__dict__.get("_runner")
        if runner is not None:
            runner.shutdown()
        self._compilation = None
        for name in _RELEASED:
            self.__dict__.pop(f"_{name}", None)

    def _device_parts(self) -> DeviceParts:
        """Return the objects of the platform and the op provider that the runner uses."""
        ops, config = self._ops, self._context.config
        is_eager = config.model.enforce_eager
        parts = DeviceParts(
            best_tokens=ops.best_tokens,
            mask_tokens=ops.mask_tokens,
            graph_provider=None if is_eager else self.graph_provider(),
        )
        # A connector reads the cache as soon as a step returns, so steps must be synchronous.
        if config.kv_connector is not None or "async_output" not in self.provides:
            return parts
        return replace(
            parts,
            asynchronous=self._runtime.asynchronous(),
            prepare_inputs=ops.prepare_inputs,
            draw_tokens=ops.draw_tokens if "draw_tokens" in ops.overridden else None,
            # Graphs would need the parts of states, which the host knows, on the device.
            graph_capture=None if is_eager or self._has_states else self.graph_capture(),
            graph_options=GraphOptions(
                mode=config.compute.graph_mode, max_size=config.compute.max_graph_size
            ),
            shows_progress=config.load.use_tqdm_on_load and self._context.rank == 0,
        )

    def _make_provider(self, kind: str, reference: str | type) -> Any:
        """Select and create a linear method or op provider for the model's layers."""
        plugins, dtype = self._context.plugins, self._context.config.model.dtype
        cls = choose(plugins, self._context.platform, kind, reference, dtype=dtype)
        check_device(kind, cls, self._device)
        self._invariance.add(kind, cls)
        provider = construct(kind, cls, options=plugins.options_of(kind, cls))
        return with_inner_method(provider, plugins, self._context.platform, self._device)

    def _model_context(self, options: Options) -> ModelContext:
        context, compute = self._context, self._context.config.compute
        self._ops = CompletedOps(self._make_provider("ops", compute.ops or AUTO))
        return ModelContext(
            hf_config=context.config.model.hf_config,
            dtype=self._limits.dtype,
            device=self._device,
            linear_method=self._make_provider("linear_method", compute.linear_method or AUTO),
            ops=self._ops,
            max_model_len=self._limits.max_model_len,
            options=options,
            ranks=self._ranks,
        )

    def _choose_attention(self) -> type[AttentionBackend]:
        context = self._context
        requirements = attention_requirements(
            attention_facts(self._attention_layers.values()), context.config, self._device.type
        )
        reference = context.config.compute.attention_backend or AUTO
        return choose_attention(context.plugins, context.platform, reference, requirements)
