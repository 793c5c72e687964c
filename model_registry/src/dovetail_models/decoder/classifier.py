"""Decoders that classify a text: a classification head on the last token replaces the LM head.

Dimensions: S sampled positions, R results, D hidden size, L labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from dovetail.errors import ModelError
from dovetail.interfaces.model import ModelContext, WeightMapping
from dovetail_models.decoder.causal_lm import DecoderForCausalLM
from dovetail_models.decoder.shape import DecoderShape
from dovetail_models.encoder import ClassHead, read_num_labels


class SequenceClassifier(DecoderForCausalLM):
    """The base class of classifiers with the head `score`. List it before the decoder's class.

    A model with one label gives a score, such as a reward or the relevance of a document.
    """

    provides: ClassVar[frozenset[str]] = frozenset({"pooling", "tensor_parallel"})
    pooling_type: ClassVar[str] = "last"
    num_labels: int

    def make_head(self, context: ModelContext, shape: DecoderShape) -> Any:
        """Return the classification head, W [L, D], which is replicated on all ranks."""
        self.num_labels = read_num_labels(context.hf_config)
        return ClassHead(context, shape.hidden_size, self.num_labels, has_bias=False)

    def map_weights(self, shape: DecoderShape) -> Sequence[WeightMapping]:
        """Return the names and layouts of the decoder, and the name of the head."""
        return (WeightMapping(source="score", targets=("lm_head",)), *super().map_weights(shape))

    def classify(self, pooled_RD: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the head, [R, L]."""
        scores_RL: torch.Tensor = self.lm_head(pooled_RD)
        return scores_RL

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Raise ModelError: the model has no language-model head."""
        raise ModelError(f"{type(self).__name__} does not support text generation")
