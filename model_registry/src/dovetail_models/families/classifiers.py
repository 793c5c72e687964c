"""Decoders with a classification head: classification, reward and reranking models."""

from __future__ import annotations

from typing import ClassVar

from dovetail_models.decoder.classifier import SequenceClassifier
from dovetail_models.families.gemma2 import Gemma2ForCausalLM
from dovetail_models.families.llama import LlamaForCausalLM
from dovetail_models.families.mistral import MistralForCausalLM
from dovetail_models.families.phi3 import Phi3ForCausalLM
from dovetail_models.families.qwen2 import Qwen2ForCausalLM
from dovetail_models.families.qwen3 import Qwen3ForCausalLM


class Gemma2ForSequenceClassification(SequenceClassifier, Gemma2ForCausalLM):
    """Gemma 2 with a classification head."""

    architectures: ClassVar[tuple[str, ...]] = ("Gemma2ForSequenceClassification",)


class LlamaForSequenceClassification(SequenceClassifier, LlamaForCausalLM):
    """Llama with a classification head."""

    architectures: ClassVar[tuple[str, ...]] = ("LlamaForSequenceClassification",)


class MistralForSequenceClassification(SequenceClassifier, MistralForCausalLM):
    """Mistral with a classification head."""

    architectures: ClassVar[tuple[str, ...]] = ("MistralForSequenceClassification",)


class Phi3ForSequenceClassification(SequenceClassifier, Phi3ForCausalLM):
    """Phi-3 with a classification head."""

    architectures: ClassVar[tuple[str, ...]] = ("Phi3ForSequenceClassification",)


class Qwen2ForSequenceClassification(SequenceClassifier, Qwen2ForCausalLM):
    """Qwen 2 with a classification head."""

    architectures: ClassVar[tuple[str, ...]] = ("Qwen2ForSequenceClassification",)


class Qwen3ForSequenceClassification(SequenceClassifier, Qwen3ForCausalLM):
    """Qwen 3 with a classification head."""

    architectures: ClassVar[tuple[str, ...]] = ("Qwen3ForSequenceClassification",)
