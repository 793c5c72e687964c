"""Random weights with which every part of a model of transformers affects its logits."""

from __future__ import annotations

import torch

from parity.checkpoints import LOGIT_STD, VOCAB_SIZE


@torch.no_grad()
def fill(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Fill all weights so that every part of the model affects the logits.

    Linear layers keep the variance, and biases are large. The scale of each norm keeps its own
    default, 0 or 1, and the signs of the last norm are random: with equal signs a tied model
    repeats its input. The head is scaled so that logits have a deviation near `LOGIT_STD`.

    The states of delta nets have a half-life of about 50 tokens. With faster decays, few keys
    contribute to a state. If a query is orthogonal to them, the output of a head is nearly zero,
    and its norm amplifies the rounding errors of all previous layers, in transformers too.
    """
    is_scale = {
        id(module.weight)
        for module in model.modules()
        if "norm" in type(module).__name__.lower() and getattr(module, "weight", None) is not None
    }
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if id(parameter) in is_scale:
            noise = parameter + 0.2 * noise
        elif name.endswith("linear_attn.A_log"):
            noise = -4.0 + 0.3 * noise
        elif name.endswith((".A_log", ".D")):
            noise = {"g": -2.0, "D": 1.0}[name[-1]] + 0.3 * noise  # states that decay slowly
        elif name.endswith("recurrent_param"):
            noise = noise - 6.0  # states that decay slowly
        elif name.endswith("bias") or parameter.ndim == 1:
            noise *= 0.3
        else:
            is_transposed = "c_" in name and "conv1d" in _owner(model, name)
            noise *= parameter.shape[0 if is_transposed else -1] ** -0.5
        parameter.copy_(noise)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    _scale_logits(model, generator)


def _owner(model: torch.nn.Module, name: str) -> str:
    return type(model.get_submodule(name.rpartition(".")[0])).__name__.lower()


def _scale_logits(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Scale the head, and the embedding with it if both are tied."""
    ids = torch.randint(0, VOCAB_SIZE, (1, 64), generator=generator)
    head = model.get_output_embeddings().weight
    for _ in range(3):
        deviation = model(ids).logits.std()
        head.mul_(float(LOGIT_STD / deviation))
