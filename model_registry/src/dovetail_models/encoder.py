"""Code that encoders share: the base class of models that only pool, and classification heads.

Dimensions: T tokens, S sampled positions, R results, L labels.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from dovetail.errors import ModelError
from dovetail.interfaces.model import ModelContext
from dovetail_models.config_reader import Config, read_count


class Encoder(nn.Module):
    """The base class of models that compute a whole prompt in one step and generate no tokens."""

    CONTRACT: ClassVar[str] = "model"
    CONTRACT_VERSION: ClassVar[str] = "0.10"
    provides: ClassVar[frozenset[str]] = frozenset({"pooling", "tensor_parallel", "whole_prompts"})
    architectures: ClassVar[tuple[str, ...]]
    pooling_type: str = "cls"
    num_labels: int = 0

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Raise ModelError: the model has no language-model head."""
        raise ModelError(f"{type(self).__name__} does not generate")

    def classify(self, pooled_RD: torch.Tensor) -> torch.Tensor:
        """Raise ModelError: the model has no classification head."""
        raise ModelError(f"{type(self).__name__} has no classification head")


class ClassHead(nn.Module):
    """A linear classification head, with or without bias, replicated on all ranks."""

    def __init__(
        self, context: ModelContext, in_features: int, out_features: int, *, has_bias: bool = True
    ) -> None:
        super().__init__()
        factory_kwargs = {"dtype": context.dtype, "device": context.device}
        weight_OD = torch.empty(out_features, in_features, **factory_kwargs)
        self.weight = nn.Parameter(weight_OD, requires_grad=False)
        self.bias: nn.Parameter | None = None
        if has_bias:
            bias_O = torch.empty(out_features, **factory_kwargs)
            self.bias = nn.Parameter(bias_O, requires_grad=False)

    def forward(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Return the scores of the classes, [R, L]."""
        return functional.linear(x_RD, self.weight, self.bias)


def read_num_labels(config: Config) -> int:
    """Return the number of labels: the length of `id2label`, or `num_labels`, or 2."""
    labels = config.get("id2label")
    default = len(labels) if isinstance(labels, dict) and labels else 2
    return read_count(config, "num_labels", default)
