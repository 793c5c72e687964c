"""The order of a step's requests in its tensors, which the attention backend may require.

Only tokens and attention batches have this order. Results and everything else are in plan order.
Dimensions: R scheduled requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail_torch.runner.device_columns import Array


def run_order(num_tokens_R: Array, thresholds: Sequence[int]) -> Array | None:
    """Return the requests in the order of the step's tensors, or None for plan order.

    thresholds: ascending. Requests with at most thresholds[i] tokens in the step precede all
    others. The order within each class is that of the plan.
    """
    if not thresholds:
        return None
    classes = np.searchsorted(thresholds, num_tokens_R)
    if (classes[1:] >= classes[:-1]).all():
        return None
    return np.argsort(classes, kind="stable")


def in_order(columns: Sequence[Array], order: Array | None) -> Sequence[Array]:
    """Return columns with one entry per request in this order."""
    return columns if order is None else [column[order] for column in columns]


def first_tokens(first_R1: Array, order: Array | None) -> Array:
    """Return the index of each request's first token, in plan order.

    first_R1: in the order of the tensors.
    """
    if order is None:
        return first_R1[:-1]
    first_R = np.empty(len(order), first_R1.dtype)
    first_R[order] = first_R1[:-1]
    return first_R
