"""The number of positions of a model, and tables that grow with the positions in use.

A model with a learned position table declares `max_positions`. A model that neither declares it nor
has a `RotaryEmbedding` is run once at its last position before the first request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dovetail.errors import ConfigError, ContractError
from dovetail_torch.attention_table import NoAttention
from dovetail_torch.layers.rotary import RotaryEmbedding
from dovetail_torch.runner.step_limits import StepLimits

_ALL = 2**63 - 1
_OUT_OF_RANGE = ("out of range", "out of bounds")


def limit_positions(model: Any, limits: StepLimits) -> StepLimits:
    """Return `limits`, with max_model_len reduced to the `max_positions` of the model, if declared.

    Raises ContractError if the declared value is not a positive integer.
    """
    declared = getattr(model, "max_positions", None)
    if declared is None:
        return limits
    if type(declared) is not int or declared < 1:
        raise ContractError(
            f"The model {type(model).__name__} declares max_positions={declared!r}; "
            "max_positions must be a positive integer. Omit it if the model supports every "
            "position."
        )
    return replace(limits, max_model_len=min(limits.max_model_len, declared))


@torch.inference_mode()
def check_last_position(model: Any, limits: StepLimits, num_layers: int) -> None:
    """Run a model that does not declare its positions at the last position.

    Raises ConfigError if the run fails.
    """
    is_rotary = any(isinstance(module, RotaryEmbedding) for module in _modules(model))
    if is_rotary or getattr(model, "max_positions", None) is not None:
        return
    last = limits.max_model_len - 1
    ids_T = torch.zeros(1, dtype=torch.int64, device=limits.device)
    try:
        model.forward(ids_T, torch.full_like(ids_T, last), NoAttention(num_layers))
    except (IndexError, RuntimeError) as error:
        text = str(error)
        if not isinstance(error, IndexError) and not any(word in text for word in _OUT_OF_RANGE):
            raise
        raise ConfigError(
            f"max_model_len={limits.max_model_len}: the model {type(model).__name__} fails at "
            f"position {last} ({text.splitlines()[0] if text else 'IndexError'}), so it supports "
            "fewer positions; lower max_model_len. A model with a position table should "
            "declare its size as max_positions."
        ) from error


class PositionTables:
    """The rotary tables of a model, filled before steps use the positions.

    num_ready: number of positions filled in all tables; a very large number if the tables are
    complete.
    """

    def __init__(self, model: Any = None) -> None:
        self._tables = [module for module in _modules(model) if isinstance(module, RotaryEmbedding)]
        for table in self._tables:
            table.grows_ahead = True
        self.num_ready = 0
        self.grow(1)

    def grow(self, num_positions: int) -> None:
        """Fill at least `num_positions` positions of each table, or all if the table has fewer."""
        self.num_ready = _ALL
        for table in self._tables:
            num_ready = table.grow(num_positions)
            if num_ready < table.num_positions:
                self.num_ready = min(self.num_ready, num_ready)


def _modules(model: Any) -> tuple[nn.Module, ...]:
    return tuple(model.modules()) if isinstance(model, nn.Module) else ()
