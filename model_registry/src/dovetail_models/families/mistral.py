"""Mistral. Source: Jiang et al. 2023, arXiv:2310.06825."""

from __future__ import annotations

from typing import ClassVar

from dovetail_models.config_reader import Config
from dovetail_models.decoder import DecoderForCausalLM, DecoderShape, read_decoder_shape
from dovetail_models.sliding_windows import read_mistral_windows


class MistralForCausalLM(DecoderForCausalLM):
    """Mistral: Llama without biases. All layers have the same sliding window, or none has one."""

    architectures: ClassVar[tuple[str, ...]] = ("MistralForCausalLM",)

    @staticmethod
    def read_shape(config: Config) -> DecoderShape:
        """Return the shape defined by config.json."""
        return read_decoder_shape(config, windows=read_mistral_windows(config))
