"""Errors of single layers of all-MiniLM-L6-v2, whose float32 weights have never been quantized.

The float32 model processes real sentences. Then each format computes each linear layer of the
encoder from the recorded input of the layer. Metric: ‖y − y_float32‖ / ‖y_float32‖ over all tokens.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from quality.job import run_tool
from quality.texts import EVALUATION

NUM_SENTENCES = 100
BATCH = 25
OURS = ("int8", "q4_k", "int4")
PER_CHANNEL = "W8 per channel, 16-bit activations"
GGUF_TYPES = {f"{kind} rounding": kind for kind in ("Q8_0", "Q4_1", "Q4_0")}
LLAMACPP_TYPES = {"Q4_K rounding (Q5_0 for rows of 384)": ("Q4_K", "Q5_0")}
"""Types that only llama.cpp writes, with a fallback for rows that blocks do not divide."""
ROUNDING_DEADLINE_S = 300.0


Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of inputs [T, I] and weights [O, I]: the outputs [T, O] of a format, without bias."""


def format_names(has_llamacpp: bool) -> list[str]:
    """Return the names of all formats, in the order of the table."""
    names = [*OURS, PER_CHANNEL, *GGUF_TYPES]
    return [*names, *LLAMACPP_TYPES] if has_llamacpp else names


def layer_errors(folder: Path, llamacpp: str | None) -> dict[str, dict[str, float]]:
    """Return the error of each format by layer. The last row is the mean of all layers.

    llamacpp: the interpreter for the types that only llama.cpp writes; None omits these types.

    Raises JobError if llama.cpp fails.
    """
    inputs = record_inputs(folder)
    errors = {
        name: {form: layer_error(compute, x_TI, weight_OI) for form, compute in formats().items()}
        for name, (x_TI, weight_OI) in inputs.items()
    }
    for form, kinds in LLAMACPP_TYPES.items() if llamacpp else ():
        weights = {name: weight_OI for name, (_, weight_OI) in inputs.items()}
        rounded = quantize_dequantize(weights, kinds, llamacpp or "")
        for name, (x_TI, weight_OI) in inputs.items():
            errors[name][form] = layer_error(_with(rounded[name]), x_TI, weight_OI)
    names = list(next(iter(errors.values())))
    errors["mean"] = {
        name: float(np.mean([layer[name] for layer in errors.values()])) for name in names
    }
    return errors


@torch.inference_mode()
def record_inputs(folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the inputs and the weights of each linear layer of the encoder."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    seen: dict[str, list[torch.Tensor]] = {}
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name.startswith("encoder.")
    }
    for name, layer in layers.items():
        layer.register_forward_pre_hook(_recording(seen.setdefault(name, [])))
    sentences = _sentences()
    for start in range(0, len(sentences), BATCH):
        for sentence in sentences[start : start + BATCH]:  # one by one: no padding is recorded
            model(**tokenizer(sentence, return_tensors="pt", truncation=True))
    return {name: (torch.cat(seen[name]), layers[name].weight.detach()) for name in layers}


def _recording(into: list[torch.Tensor]) -> Callable[[nn.Module, Any], None]:
    def record(_: nn.Module, arguments: Any) -> None:
        into.append(arguments[0].flatten(0, -2).clone())

    return record


def _sentences() -> list[str]:
    text = " ".join(EVALUATION[0].excerpt().split())
    sentences = [item for item in re.split(r"(?<=[.!?])\s+", text) if 30 < len(item) < 300]
    return sentences[:NUM_SENTENCES]


def formats() -> dict[str, Compute]:
    """Return, for each format that this process supports, the function that computes a layer."""
    ours = {name: _through_method(name) for name in OURS}
    peers = {name: _through_gguf(kind) for name, kind in GGUF_TYPES.items()}
    return {**ours, PER_CHANNEL: _per_channel, **peers}


@torch.inference_mode()
def layer_error(compute: Compute, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> float:
    """Return the relative error of a layer's outputs."""
    exact_TO = x_TI @ weight_OI.T
    difference_TO = compute(x_TI, weight_OI).float() - exact_TO
    return float(difference_TO.norm() / exact_TO.norm())


def _per_channel(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    scale_O1 = weight_OI.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    rounded_OI = (weight_OI / scale_O1).round() * scale_O1
    return (x_TI.bfloat16().float() @ rounded_OI.T).bfloat16()


def _through_gguf(kind: str) -> Compute:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    type_ = GGMLQuantizationType[kind]

    def compute(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        rounded = dequantize(quantize(weight_OI.numpy(), type_), type_)
        return x_TI @ torch.from_numpy(rounded).T

    return compute


def quantize_dequantize(
    weights: Mapping[str, torch.Tensor], kinds: tuple[str, str], python: str
) -> dict[str, torch.Tensor]:
    """Return the weights after llama.cpp's quantization. Raises JobError if that fails."""
    with tempfile.TemporaryDirectory() as folder:
        arguments, actual = Path(folder, "given.npz"), Path(folder, "found.npz")
        np.savez(arguments, **{name: weight_OI.numpy() for name, weight_OI in weights.items()})
        command = [python, "-m", "quality.quantize_dequantize", str(arguments), str(actual), *kinds]
        run_tool(command, ROUNDING_DEADLINE_S)
        with np.load(actual) as rounded:
            return {name: torch.from_numpy(rounded[name]) for name in rounded.files}


def _with(rounded_OI: torch.Tensor) -> Compute:
    return lambda x_TI, weight_OI: x_TI @ rounded_OI.T


def _through_method(method: str) -> Compute:
    """Return a function that computes with a linear method, from weights and inputs in bfloat16."""
    from dovetail.interfaces import ModelContext
    from dovetail.plugins import PluginRegistry
    from dovetail_torch.layers import TorchOps, pack_linears
    from dovetail_torch.layers.linear import ColumnParallelLinear

    def compute(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        context = ModelContext(
            hf_config={},
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            linear_method=PluginRegistry().load("linear_method", method)(),
            ops=TorchOps(),
            max_model_len=len(x_TI),
        )
        features, size = weight_OI.shape
        layer = ColumnParallelLinear(context, "layer", size, features)
        layer.weight.copy_(weight_OI)
        pack_linears(nn.ModuleList([layer]))
        result: torch.Tensor = layer(x_TI.bfloat16())
        return result

    return compute
