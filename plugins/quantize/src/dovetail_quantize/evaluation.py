"""Perplexity of a model on a text, and its KL divergence from the original model.

Dimensions: P positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dovetail_quantize.opened_model import OpenedModel

MAX_LOGITS_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Measurements over all positions. kl: mean KL divergence in nats.

    same_best: the share of positions at which both models have the same top-1 token.
    """

    perplexity: float
    kl: float = 0.0
    same_best: float = 1.0


def limit_chunks(chunks: Sequence[Sequence[int]], vocab_size: int) -> list[Sequence[int]]:
    """Return the first chunks, limited so that all their logits fit in `MAX_LOGITS_BYTES`."""
    left = max(2, MAX_LOGITS_BYTES // (4 * vocab_size))
    kept = []
    for chunk in chunks:
        if left < 2:
            break
        kept.append(chunk[:left])
        left -= len(kept[-1])
    return kept


@torch.inference_mode()
def log_probabilities(opened: OpenedModel, chunk: Sequence[int]) -> torch.Tensor:
    """Return the log-probabilities after each token of a chunk except the last, float32 [P, V]."""
    compute = opened.module.compute_logits
    rows: list[torch.Tensor] = []

    def compute_logits(hidden_PD: torch.Tensor) -> torch.Tensor:
        logits_PV: torch.Tensor = compute(hidden_PD)
        rows.append(logits_PV.float().log_softmax(-1))
        return logits_PV

    opened.module.compute_logits = compute_logits  # type: ignore[assignment]
    try:
        opened.run(chunk)
    finally:
        del opened.module.compute_logits
    # Logits of the last token, which is sampled, and those of the others come in any order.
    return _in_order(rows, len(chunk))


def _in_order(rows: Sequence[torch.Tensor], num_tokens: int) -> torch.Tensor:
    """Return the logits of the prompt in order, without those of the sampled token."""
    num_rows = sum(map(len, rows))
    if num_rows != num_tokens:
        raise RuntimeError(f"the engine computed {num_rows} rows of logits for {num_tokens} tokens")
    single = next(number for number, row in enumerate(rows) if len(row) == 1)
    return torch.cat([row for number, row in enumerate(rows) if number != single])


def measure(
    opened: OpenedModel,
    chunks: Sequence[Sequence[int]],
    reference: Sequence[torch.Tensor] | None = None,
) -> tuple[Accuracy, list[torch.Tensor]]:
    """Return the measurements, and the log-probabilities of each chunk.

    reference: log-probabilities of the original model; None for the original model itself.
    """
    logits: list[torch.Tensor] = []
    nll = kl = same = 0.0
    count = 0
    for number, chunk in enumerate(chunks):
        log_q_PV = log_probabilities(opened, chunk)
        targets_P1 = torch.tensor(chunk[1:]).unsqueeze(1)
        nll -= float(log_q_PV.gather(1, targets_P1).double().sum())
        count += len(log_q_PV)
        if reference is None:
            logits.append(log_q_PV)
            continue
        log_p_PV = reference[number]
        kl += float(
            torch.nn.functional.kl_div(log_q_PV, log_p_PV, reduction="sum", log_target=True)
        )
        same += int((log_q_PV.argmax(-1) == log_p_PV.argmax(-1)).sum())
    perplexity = math.exp(min(700.0, nll / count))
    if reference is None:
        return Accuracy(perplexity=perplexity), logits
    return Accuracy(perplexity=perplexity, kl=kl / count, same_best=same / count), []
