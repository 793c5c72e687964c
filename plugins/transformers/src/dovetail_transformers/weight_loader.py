"""The `transformers` weight loader, which lets transformers read a safetensors checkpoint.

Names in checkpoints differ from those of modules, and transformers knows the conversions.
"""

from __future__ import annotations

import copy
import importlib
from typing import ClassVar

import torch
from safetensors import SafetensorError
from torch import nn

from dovetail.errors import WeightError
from dovetail.interfaces.weight_loader import WeightLoader, WeightLoaderContext
from dovetail_transformers.attention_calls import IMPLEMENTATION
from dovetail_transformers.model import TransformersForCausalLM

_NUM_SHOWN = 5


class TransformersLoader(WeightLoader):
    """Reads the weights of a model directory. Only safetensors files are read, never pickles."""

    example_files: ClassVar[str] = "checkpoints of models of the transformers library"

    def __init__(self, context: WeightLoaderContext) -> None:
        """Store `context`. No file is read."""
        self.context = context

    @torch.no_grad()
    def load(self, model: nn.Module) -> int:
        """Replace all weights and return the bytes read.

        Raises WeightError for missing, unexpected or damaged weights.
        """
        if not isinstance(model, TransformersForCausalLM):
            raise WeightError(
                "load_format='transformers' loads models of the transformers library, not "
                f"{type(model).__name__}. Omit load_format, or set model_impl='transformers'."
            )
        logging = importlib.import_module("transformers.utils.logging")
        if not self.context.progress:
            logging.disable_progress_bar()
        classes = importlib.import_module("dovetail_transformers.model_classes")
        target = model.module
        folder = self.context.model_dir
        try:
            with classes.LOCK:
                loaded, report = type(target).from_pretrained(
                    folder,
                    config=copy.deepcopy(target.config),
                    dtype=target.dtype,
                    attn_implementation=IMPLEMENTATION,
                    experts_implementation=target.config._experts_implementation,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                    output_loading_info=True,
                )
        except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
            raise WeightError(
                f"{folder}: transformers cannot read the weights: {str(error)[:300]}"
            ) from error
        for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
            names = sorted(map(str, report.get(problem) or ()))
            if names:
                shown = ", ".join(names[:_NUM_SHOWN])
                raise WeightError(f"{folder}: {problem.replace('_keys', ' weights')}: {shown}")
        num_bytes = sum(parameter.nbytes for parameter in loaded.parameters())
        model.adopt(loaded)
        model.fill_sinks()
        return num_bytes
