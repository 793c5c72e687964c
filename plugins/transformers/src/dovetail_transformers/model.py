"""Runs a model class of the transformers library over the engine's paged KV cache.

Dimensions: T tokens, S needed tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from dovetail.errors import ModelError
from dovetail.interfaces.model import AttentionContext, ModelContext
from dovetail.value_checks import shorten
from dovetail_torch.layers import Attention, HeadShape
from dovetail_transformers.attention_calls import (
    IMPLEMENTATION,
    Call,
    RecordedCalls,
    StepCalls,
    set_taker,
)
from dovetail_transformers.self_check import check, reference_logits
from dovetail_transformers.tensor_parallel import FakeRanks, check_plan, shard_model

if TYPE_CHECKING:  # transformers is imported when a model is created: the import takes seconds
    import transformers

_CPU = torch.device("cpu")
_PROBE_LEN = 3
_REMEDY = "Install a plugin with a model of this architecture."
_EXPERTS = {"cpu": "eager", "meta": "batched_mm"}
"""The experts implementation of transformers to use, by device type; others use the default.

On CPUs, the default supports only bfloat16. On "meta", "eager" does not work, because its loop over
the experts reads tensor values.
"""


class TransformersForCausalLM(nn.Module):
    """A decoder of the transformers library that runs over the engine's paged KV cache.

    module: the model of the transformers library. attn: one attention layer for each module that
    calls transformers' attention interface. The first forward pass compares the model with
    transformers' own attention.
    The hidden states of this model are its logits, because each class scales and caps them itself.
    With several ranks, the model is sharded by its plan in transformers.
    reference: the logits of the unsharded model, for the check of a loaded model that is sharded;
    otherwise None.
    """

    CONTRACT: ClassVar[str] = "model"
    CONTRACT_VERSION: ClassVar[str] = "0.10"
    provides: ClassVar[frozenset[str]] = frozenset({"tensor_parallel"})
    architectures: ClassVar[tuple[str, ...]] = ("TransformersForCausalLM",)
    example_config: ClassVar[Mapping[str, Any]] = {"architectures": ["LlamaForCausalLM"]}

    def __init__(self, context: ModelContext) -> None:
        """Create the model with uninitialized weights.

        Raises ModelError, naming the field or the class, for an architecture that transformers
        does not have or that would be computed incorrectly.
        """
        super().__init__()
        if context.linear_method.error:
            raise ModelError(
                "The implementation in transformers does not support quantized linear layers. "
                "Omit quantization, or set model_impl='native'."
            )
        size = context.hf_config.get("vocab_size")
        if type(size) is not int or not 0 < size < 1 << 31:
            raise ModelError(
                f"config.json: vocab_size is {shorten(size)}; it must be an integer from 1 to "
                f"{(1 << 31) - 1}."
            )
        classes = importlib.import_module("dovetail_transformers.model_classes")
        self.config = classes.read_config(context.hf_config)
        self.cls = classes.find_class(context.hf_config, self.config)
        self.device, self.ranks = context.device, context.ranks
        self.reference: list[torch.Tensor] | None = None
        is_sharded = self.ranks.size > 1
        moves = is_sharded and self.device.type != "meta"
        with classes.LOCK, classes.no_init_weights():
            self.module = self._create(context.dtype, _CPU if moves else self.device)
            recorded, probed = self._record(context)
            names = {id(module): name for name, module in probed.named_modules()}
            self.attention_names = [names[id(module)] for module in recorded.modules]
            parameters = {id(parameter): name for name, parameter in probed.named_parameters()}
            self.sink_names = [parameters.get(id(call.sinks), "") for call in recorded.calls]
            self._vocab_size = int(probed.get_output_embeddings().weight.shape[0])
            if is_sharded:
                self._check_sharding(context.dtype, recorded)
                shard_model(self.module, self.ranks)
        self.attn = nn.ModuleList(
            _make_layer(call, index, context) for index, call in enumerate(recorded.calls)
        )
        self._use(self.module)
        self.keeps_logits = "logits_to_keep" in inspect.signature(self.module.forward).parameters
        self.is_checked, self.max_model_len = False, context.max_model_len

    def adopt(self, module: transformers.PreTrainedModel) -> None:
        """Use the weights of `module`, an unsharded model of the same class and config on a CPU."""
        if self.ranks.size > 1:
            self.module = module.eval().requires_grad_(False)
            with _experts(module, "eager"):
                self.reference = reference_logits(self, _CPU)
            shard_model(module, self.ranks)
        self._use(module)

    def _use(self, module: transformers.PreTrainedModel) -> None:
        self.module = module.to(self.device).eval().requires_grad_(False)
        modules = [module.get_submodule(name) for name in self.attention_names]
        self.calls = StepCalls(modules, self.attn, self.ranks)
        set_taker(module, self.calls)

    def _check_sharding(self, dtype: torch.dtype, recorded: RecordedCalls) -> None:
        """Raise ConfigError or ModelError if the ranks cannot share the model.

        recorded: the calls of the unsharded model.
        """
        size = self.ranks.size
        probed = self._create(dtype, torch.device("meta"))
        check_plan(probed, self.ranks)
        shares = [
            call.heads.share(self.ranks, name)
            for name, call in zip(self.attention_names, recorded.calls, strict=True)
        ]
        shard_model(probed, FakeRanks(size=size))
        problem = "its numbers of heads do not fit"
        try:
            heads = [call.heads for call in _record(probed).calls]
        except (ModelError, NotImplementedError, RuntimeError, ValueError) as error:
            heads, problem = [], shorten(str(error))
        wholes = [call.heads for call in recorded.calls]
        if heads not in (shares, wholes):
            raise ModelError(
                f"tensor_parallel_size={size} was requested, but {self.cls.__name__} in "
                f"transformers cannot be sharded by its plan ({wholes[0].num_heads} query heads, "
                f"{wholes[0].num_kv_heads} key-value heads): {problem}\nSet "
                "tensor_parallel_size=1, or install a plugin with a model of this architecture."
            )

    def _create(self, dtype: torch.dtype, device: torch.device) -> transformers.PreTrainedModel:
        """Return the model with uninitialized weights. Raise ModelError for an invalid config."""
        config = copy.deepcopy(self.config)
        kind = device.type if device.type == "meta" else self.device.type
        try:
            with torch.device(device):
                model = self.cls._from_config(
                    config,
                    dtype=dtype,
                    attn_implementation=IMPLEMENTATION,
                    experts_implementation=_EXPERTS.get(kind),
                )
        except (AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"{self.cls.__name__} in transformers cannot be created with this config.json and "
                f"the attention interface: {type(error).__name__}: {shorten(str(error))}\n{_REMEDY}"
            ) from error
        return model.eval().requires_grad_(False)

    def _record(self, context: ModelContext) -> tuple[RecordedCalls, nn.Module]:
        """Return the attention calls of a forward pass, and the model that made them.

        The pass runs on the device "meta", or on the model itself if that is not possible.
        """
        try:
            probed = self._create(context.dtype, torch.device("meta"))
            recorded = _record(probed)
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error).lower() or context.device.type == "meta":
                raise
            probed = self.module
            recorded = _record(probed)
        num_layers = getattr(self.config, "num_hidden_layers", 0)
        names = {id(module) for module in recorded.modules}
        if len(names) != len(recorded.calls) or len(names) != num_layers:
            raise ModelError(
                f"{self.cls.__name__} in transformers cannot be served: {len(names)} of its "
                f"{num_layers} layers call the attention interface (with {len(recorded.calls)} "
                f"calls), so the others need a recurrent state or a mask.\n{_REMEDY}"
            )
        return recorded, probed

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the logits of the needed tokens, [S, V]. The first call checks the model."""
        if not self.is_checked:
            self.fill_sinks()
            check(self, input_ids_T.device)
            self.is_checked = True
        return self.step(input_ids_T, positions_T, attention)

    def step(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the logits of the needed tokens, [S, V]."""
        numbers_T1 = torch.arange(len(input_ids_T), device=input_ids_T.device)[:, None]
        needed_S = attention.narrow(numbers_T1)[:, 0]
        needs_all = len(needed_S) == len(input_ids_T)
        self.calls.attention = attention
        try:
            arguments: dict[str, Any] = {"position_ids": positions_T[None], "use_cache": False}
            if self.keeps_logits and not needs_all:
                arguments["logits_to_keep"] = needed_S
            logits_TV: torch.Tensor = self.module(input_ids_T[None], **arguments).logits[0]
        finally:
            self.calls.attention = None
        return logits_TV if self.keeps_logits or needs_all else logits_TV[needed_S]

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return the logits, which `forward` has computed."""
        return hidden_SD

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._vocab_size

    def eager_logits(self, input_ids_T: torch.Tensor, window: int | None) -> torch.Tensor:
        """Return the logits of one sequence, computed by transformers' own attention, [T, V].

        window: temporarily replaces `sliding_window` of the config, from which transformers builds
        its masks; None for no change.
        """
        with _eager(self.module, window):
            logits_TV: torch.Tensor = self.module(input_ids_T[None], use_cache=False).logits[0]
        return logits_TV

    @torch.no_grad()
    def fill_sinks(self) -> None:
        """Copy the attention sinks to the attention layers. Call this after loading the weights."""
        for layer, name in zip(self.attn, self.sink_names, strict=True):
            if name and isinstance(layer, Attention) and layer.sinks is not None:
                sinks_H = self.module.get_parameter(name)
                shard = layer.shards.get("sinks")
                if shard is not None and len(sinks_H) == shard.whole:
                    sinks_H = sinks_H[shard.slice]
                layer.sinks.copy_(sinks_H)


def _record(model: transformers.PreTrainedModel) -> RecordedCalls:
    recorded = RecordedCalls()
    set_taker(model, recorded)
    ids = torch.zeros((1, _PROBE_LEN), dtype=torch.int64, device=model.device)
    positions = torch.arange(_PROBE_LEN, device=model.device)[None]
    with torch.inference_mode():
        try:
            model(ids, position_ids=positions, use_cache=False)
        except (TypeError, AttributeError, ValueError, IndexError, AssertionError) as error:
            raise ModelError(
                f"{type(model).__name__} in transformers cannot be served: its forward pass does "
                f"not work with positions and without a mask: {shorten(str(error))}\n{_REMEDY}"
            ) from error
    return recorded


def _make_layer(call: Call, index: int, context: ModelContext) -> Attention:
    (num_heads, size), (num_kv_heads, value_size) = call.q_THD.shape[1:], call.v_TKV.shape[1:]
    if value_size > size:
        raise ModelError(
            f"Attention layer {index} has values of {value_size} features, more than its keys "
            f"({size}), which is not supported."
        )
    sinks = None
    if call.sinks is not None:
        empty_H = torch.zeros(num_heads, dtype=torch.float32, device=context.device)
        sinks = nn.Parameter(empty_H, requires_grad=False)
    heads = HeadShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=size)
    return Attention(
        heads,
        index,
        scale=call.scale,
        sliding_window=call.sliding_window,
        soft_cap=call.soft_cap,
        sinks=sinks,
    )


@contextmanager
def _eager(model: transformers.PreTrainedModel, window: int | None) -> Iterator[None]:
    """Make a model use transformers' own attention. window: see `eager_logits`."""
    stated = getattr(model.config, "sliding_window", None)
    if window is not None:
        model.config.sliding_window = window
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(IMPLEMENTATION)
        if window is not None:
            model.config.sliding_window = stated


@contextmanager
def _experts(model: transformers.PreTrainedModel, implementation: str) -> Iterator[None]:
    """Make a model compute its experts with another implementation."""
    before = model.config._experts_implementation
    model.set_experts_implementation(implementation)
    try:
        yield
    finally:
        model.set_experts_implementation(before)
