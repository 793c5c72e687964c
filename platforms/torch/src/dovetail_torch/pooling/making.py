"""Creates the pooler of a loaded model from the configuration, and checks that they match."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from dovetail.errors import ConfigError, ModelError
from dovetail.interfaces.engine_config import WorkerConfig
from dovetail.interfaces.model import WeightMapping
from dovetail.interfaces.worker import ModelInfo
from dovetail_torch.attention_table import NoAttention
from dovetail_torch.layers.embedding import ParallelLMHead
from dovetail_torch.pooling.head import class_activation, load_dense
from dovetail_torch.pooling.pooler import LAST, PoolerHead
from dovetail_torch.runner.step_limits import StepLimits

POOLING = "pooling"
WHOLE_PROMPTS = "whole_prompts"
_BASE_NAMES = ("embed_tokens", "layers", "norm")
"""Modules of a decoder, which checkpoints of embedding models may name without a prefix."""


def adapt_model(model: Any, config: WorkerConfig) -> None:
    """Remove the LM head of a generative model if the engine pools. Call it before loading.

    Raises ConfigError if the model only pools, but the engine would generate.
    """
    only_pools = POOLING in getattr(model, "provides", ())
    if not config.model.pooler:
        if only_pools:
            raise ConfigError(
                f"The model {type(model).__name__} supports only pooling; set runner='pooling'."
            )
        return
    head = getattr(model, "lm_head", None)
    if only_pools or not isinstance(head, ParallelLMHead):
        return
    del model.lm_head
    mappings = tuple(getattr(model, "weight_mappings", ()))
    mappings += tuple(_without_prefix(mappings))
    plain = tuple(WeightMapping(source=name, targets=(f"model.{name}",)) for name in _BASE_NAMES)
    model.weight_mappings = (WeightMapping(source="lm_head"), *mappings, *plain)


def _without_prefix(mappings: Iterable[WeightMapping]) -> Iterator[WeightMapping]:
    """Yield the mappings for checkpoints whose names lack the first part, such as "model"."""
    for mapping in mappings:
        _, _, other = mapping.source.partition(".")
        if other and not other.startswith("{"):
            yield replace(mapping, source=other)


@torch.inference_mode()
def make_head(
    model: Any, config: WorkerConfig, limits: StepLimits, num_layers: int
) -> PoolerHead | None:
    """Return the pooler head of a loaded model, or None if the engine generates.

    Raises ModelError for files that do not match the model.
    """
    pooler: Mapping[str, Any] = config.model.pooler
    if not pooler:
        return None
    own = getattr(model, "pooling_type", LAST)
    pooling = own if pooler["pooling"] == "auto" else pooler["pooling"]
    ids_T = torch.zeros(1, dtype=torch.int64, device=limits.device)
    hidden_TD = model.forward(ids_T, torch.zeros_like(ids_T), NoAttention(num_layers))
    num_labels = getattr(model, "num_labels", 0)
    if num_labels:
        if pooler.get("dense"):
            raise ModelError("A model with a classification head cannot have dense modules.")
        return PoolerHead(
            pooling=pooling or own,
            classify=model.classify,
            activation=class_activation(config.model.hf_config, num_labels),
            num_labels=num_labels,
        )
    layers = pooler.get("dense", ())
    dense = load_dense(config.model.model_dir, layers, hidden_TD.shape[-1], limits.device)
    size = layers[-1]["out_features"] if layers else hidden_TD.shape[-1]
    return PoolerHead(
        pooling=pooling,
        normalize=pooler["normalize"],
        dense=dense,
        embedding_size=size,
        dimensions=_trained_dimensions(config.model.hf_config),
    )


def pooling_info(info: ModelInfo, head: PoolerHead | None, model: Any) -> ModelInfo:
    """Return `info` with the tasks and rules of a pooling model. head: None to generate."""
    if head is None:
        return info
    is_whole = WHOLE_PROMPTS in getattr(model, "provides", ())
    return replace(
        info,
        supported_tasks=head.tasks,
        embedding_size=head.embedding_size,
        embedding_dimensions=head.dimensions,
        whole_prompts=is_whole,
        resumes_prompts=not is_whole and head.pooling == LAST,
    )


def _trained_dimensions(hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return `matryoshka_dimensions` of config.json, or ()."""
    value = hf_config.get("matryoshka_dimensions") or ()
    is_list = isinstance(value, (list, tuple))
    if not is_list or not all(type(item) is int and item > 0 for item in value):
        raise ModelError("config.json: matryoshka_dimensions must be a list of positive integers.")
    return tuple(sorted(value))
