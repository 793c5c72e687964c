"""Untie weights that a config ties although the checkpoint has different values for them.

transformers ties two weights only if one of them is missing in the checkpoint or both are equal in
the model's dtype; otherwise it warns and loads both (`PreTrainedModel.tie_weights`).
This module does the same for every loader that reads a checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import nn

from dovetail_torch.weights.assignment import WeightTable
from dovetail_torch.weights.checkpoint_files import WeightEntry, open_weights

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 4096


def untie_different(
    model: nn.Module, table: WeightTable, entries: Mapping[str, WeightEntry]
) -> bool:
    """Untie weights that differ in the checkpoint. Return whether there were any.

    Warns for each pair, naming both weights. If the result is True, the table of `model` must be
    rebuilt.
    """
    untied = False
    for own_name, own_source in table.aliases.items():
        name, source = map(table.names.to_checkpoint, (own_name, own_source))
        if name not in entries or source not in entries:
            continue
        parent_name, _, leaf = own_name.rpartition(".")
        parent = model.get_submodule(parent_name)
        tied: nn.Parameter = getattr(parent, leaf)
        if _are_equal(entries[name], entries[source], tied.dtype):
            continue
        logger.warning(
            "config.json ties %s to %s (tie_word_embeddings), but the checkpoint has both with "
            "different values: they are not tied, and both are loaded. Set "
            "tie_word_embeddings=false in config.json to silence this warning.",
            name,
            source,
        )
        setattr(parent, leaf, nn.Parameter(torch.empty_like(tied), requires_grad=False))
        untied = True
    return untied


def _are_equal(first: WeightEntry, second: WeightEntry, dtype: torch.dtype) -> bool:
    """Compare two weights in the model's dtype, a few rows at a time."""
    if first.shape != second.shape:
        return False
    with open_weights(first.path) as first_file, open_weights(second.path) as second_file:
        pairs = zip(
            first_file.get_tensor(first.name).split(_ROWS_AT_ONCE),
            second_file.get_tensor(second.name).split(_ROWS_AT_ONCE),
            strict=True,
        )
        return all(torch.equal(a.to(dtype), b.to(dtype)) for a, b in pairs)
