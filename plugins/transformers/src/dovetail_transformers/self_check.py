"""Compares a loaded model with transformers' own eager forward pass, before the first step.

Two sequences are packed and divided into chunks as the engine does it. A model that computes
something outside of its attention function, such as a recurrent state or a mask, differs. Sliding
windows are shortened, so that a window that exists only in a mask changes the logits.
Dimensions: T tokens, L tokens of one sequence so far, H query heads, K key-value heads, D head
size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from dovetail.errors import ModelError
from dovetail.interfaces import RotaryArgs
from dovetail_torch.layers import Attention

if TYPE_CHECKING:
    from dovetail_transformers.model import TransformersForCausalLM

LENGTHS = (11, 18)
"""Tokens of each sequence."""
CHUNKS = ((5, 7), (6, 1), (0, 10))
"""Tokens of each sequence in each step."""
WINDOW = 4
"""Tokens of a shortened sliding window."""
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Maximum relative error of a row of logits (norm of the difference / norm of the row)."""
OTHER_TOLERANCE = 0.1
"""The maximum relative error for other dtypes."""


def reference_logits(model: TransformersForCausalLM, device: torch.device) -> list[torch.Tensor]:
    """Return the eager logits of each sequence, [T, V]."""
    window = _window(model)
    return [model.eager_logits(sequence, window) for sequence in _sequences(model, device)]


def check(model: TransformersForCausalLM, device: torch.device) -> None:
    """Raise ModelError if the packed, chunked logits differ from the eager ones.

    If a loaded model is sharded, each rank compares with the unsharded model.
    """
    sequences, window = _sequences(model, device), _window(model)
    expected = model.reference or reference_logits(model, device)
    model.reference = None
    stated = getattr(model.module.config, "sliding_window", None)
    layers: Sequence[Any] = [
        _shortened(layer) if window and layer.sliding_window == stated else layer
        for layer in model.attn
    ]
    context = DenseAttention(layers, len(sequences))
    done = [0] * len(sequences)
    actual: list[list[torch.Tensor]] = [[] for _ in sequences]
    for counts in CHUNKS:
        ids_T = torch.cat([s[d : d + n] for s, d, n in zip(sequences, done, counts, strict=True)])
        spans = [torch.arange(d, d + n) for d, n in zip(done, counts, strict=True)]
        context.counts = counts
        logits_TV = model.step(ids_T, torch.cat(spans).to(device), context)
        for rows, part_TV in zip(actual, logits_TV.split(list(counts)), strict=True):
            rows.append(part_TV)
        done = [d + n for d, n in zip(done, counts, strict=True)]
    for expected_LV, rows in zip(expected, actual, strict=True):
        _compare(type(model.module).__name__, expected_LV.to(device), torch.cat(rows))


def _sequences(model: TransformersForCausalLM, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, model.vocab_size, (length,), generator=generator).to(device)
        for length in LENGTHS
    ]


def _window(model: TransformersForCausalLM) -> int | None:
    """Return the shortened window, or None if windows have no effect or are already short."""
    stated = getattr(model.module.config, "sliding_window", None)
    return WINDOW if type(stated) is int and WINDOW < stated < model.max_model_len else None


def _shortened(layer: Attention) -> SimpleNamespace:
    """Return the attributes of a layer, with a shortened window."""
    names = ("num_heads", "num_kv_heads", "scale", "soft_cap", "sinks")
    return SimpleNamespace(sliding_window=WINDOW, **{name: getattr(layer, name) for name in names})


def _compare(name: str, expected_LV: torch.Tensor, actual_LV: torch.Tensor) -> None:
    tolerance = TOLERANCES.get(expected_LV.dtype, OTHER_TOLERANCE)
    expected_LV, actual_LV = expected_LV.float(), actual_LV.float()
    norm_L = expected_LV.norm(dim=-1).clamp_min(1e-6)
    error_L = (expected_LV - actual_LV).norm(dim=-1) / norm_L
    worst = float(error_L.nan_to_num(float("inf")).max())
    if worst > tolerance:
        raise ModelError(
            f"{name} in transformers cannot be served: its logits for packed sequences in chunks "
            f"differ from those of its own forward pass by {worst:.2g} (at most {tolerance:g} is "
            f"accepted), first at position {int((error_L > tolerance).nonzero()[0])}. It computes "
            "something across tokens outside of its attention function.\nInstall a plugin with a "
            "model of this architecture."
        )


class DenseAttention:
    """An attention context that stores the keys and values of each sequence in one tensor.

    counts: tokens of each sequence in the current step.
    """

    def __init__(self, layers: Sequence[Any], num_sequences: int) -> None:
        self._layers = layers
        self._kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.counts: Sequence[int] = (0,) * num_sequences

    def attend(
        self,
        index: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        rotary_args: RotaryArgs | None = None,
    ) -> torch.Tensor:
        """Return the attention of the tokens of all sequences, [T, H, D]."""
        counts = list(self.counts)
        parts = zip(q_THD.split(counts), k_TKD.split(counts), v_TKD.split(counts), strict=True)
        results = []
        for number, (q, k, v) in enumerate(parts):
            if before := self._kept.get((index, number)):
                k, v = torch.cat((before[0], k)), torch.cat((before[1], v))
            self._kept[index, number] = k, v
            results.append(attend_densely(self._layers[index], q, k, v))
        return torch.cat(results)

    def narrow(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return all rows."""
        return x_TD


def attend_densely(
    layer: Any, q_THD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor
) -> torch.Tensor:
    """Return the causal attention of the last T of L tokens, [T, H, D].

    It is computed directly from the definition. layer: an `Attention`, or an object with the same
    attributes.
    """
    groups = layer.num_heads // layer.num_kv_heads
    k_LHD, v_LHD = k_LKD.repeat_interleave(groups, 1), v_LKD.repeat_interleave(groups, 1)
    scores_HTL = torch.einsum("thd,lhd->htl", q_THD.float(), k_LHD.float()) * layer.scale
    if layer.soft_cap:
        scores_HTL = (scores_HTL / layer.soft_cap).tanh() * layer.soft_cap
    num_keys, device = len(k_LKD), q_THD.device
    keys_L = torch.arange(num_keys, device=device)
    queries_T1 = torch.arange(num_keys - len(q_THD), num_keys, device=device)[:, None]
    hidden_TL = keys_L > queries_T1
    if layer.sliding_window:
        hidden_TL |= keys_L <= queries_T1 - layer.sliding_window
    scores_HTL = scores_HTL.masked_fill(hidden_TL, -torch.inf)
    if layer.sinks is not None:
        sinks_HT1 = layer.sinks.float()[:, None, None].expand(-1, len(q_THD), 1)
        scores_HTL = torch.cat((scores_HTL, sinks_HT1), dim=-1)
    weights_HTL = scores_HTL.softmax(-1)[..., :num_keys]
    return torch.einsum("htl,lhd->thd", weights_HTL, v_LHD.float()).to(q_THD.dtype)
