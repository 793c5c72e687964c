"""GPTQ: rounds a weight column by column; later columns compensate the errors of earlier ones.

Source: Frantar et al. 2022, arXiv:2210.17323. The columns are rounded in the order of the input
features.
Dimensions: O output features, I input features, G groups of a block, K values of a group, N blocks.
"""

from __future__ import annotations

import torch

from dovetail.errors import WeightError
from dovetail_quantize.calibration import Moments
from dovetail_quantize.rounding import BlockType, Grid

_BATCH = 256
"""Columns per batch, a multiple of every block size. Later batches are corrected once per batch."""


def inverse_factor(moments: Moments, damping: float, name: str) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse of the damped moments, float32 [I, I].

    Raises WeightError, naming the layer, if the matrix cannot be inverted.
    """
    products_II = moments.products_II.double()
    mean = float(products_II.diagonal().mean())
    products_II.diagonal().add_(damping * mean + 1e-30)
    try:
        inverse_II = torch.cholesky_inverse(torch.linalg.cholesky(products_II))
        return torch.linalg.cholesky(inverse_II, upper=True).float()
    except torch.linalg.LinAlgError:
        raise WeightError(
            f"{name}: GPTQ cannot invert the moments of its inputs; use more calibration data "
            "or a larger --damping."
        ) from None


@torch.inference_mode()
def round_columns(
    weight_OI: torch.Tensor, kind: BlockType, moments: Moments, factor_II: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks, uint8 [O, bytes], and the values that they represent, float32 [O, I].

    factor_II: the result of `inverse_factor`.
    """
    rest_OI = weight_OI.float().clone()
    num_rows, num_columns = rest_OI.shape
    importance_I = moments.mean_squares
    blocks, values = [], []
    for start in range(0, num_columns, _BATCH):
        end = min(start + _BATCH, num_columns)
        batch_OB = rest_OI[:, start:end]
        factor_BB = factor_II[start:end, start:end]
        errors_OB = torch.empty_like(batch_OB)
        for first in range(0, end - start, kind.size):
            part = slice(first, first + kind.size)
            x_NGK = batch_OB[:, part].reshape(num_rows, -1, kind.group)
            importance = importance_I[start:end][part].view(1, -1, kind.group)
            grid = kind.fit(x_NGK, importance)
            codes_OS, values_OS = _round_block(batch_OB, errors_OB, first, kind, grid, factor_BB)
            blocks.append(kind.encode(codes_OS.to(torch.int32), grid))
            values.append(values_OS)
        rest_OI[:, end:] -= errors_OB @ factor_II[start:end, end:]
    return torch.cat(blocks, 1), torch.cat(values, 1)


def _round_block(
    batch_OB: torch.Tensor,
    errors_OB: torch.Tensor,
    first: int,
    kind: BlockType,
    grid: Grid,
    factor_BB: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round the columns of one block per row. Change the later columns of the batch."""
    num_rows = len(batch_OB)
    codes_OS = batch_OB.new_empty(num_rows, kind.size)
    values_OS = torch.empty_like(codes_OS)
    scale_OS = grid.scale.expand(-1, -1, kind.group).reshape(num_rows, kind.size)
    minimum_OS = grid.minimum.expand(-1, -1, kind.group).reshape(num_rows, kind.size)
    for index in range(kind.size):
        column = first + index
        x_O, scale_O, minimum_O = batch_OB[:, column], scale_OS[:, index], minimum_OS[:, index]
        code_O = ((x_O - minimum_O) / scale_O).round_().nan_to_num_(0.0)
        code_O.clamp_(kind.low, kind.high)
        value_O = code_O * scale_O + minimum_O
        error_O = (x_O - value_O) / factor_BB[column, column]
        batch_OB[:, column + 1 :].addr_(error_O, factor_BB[column, column + 1 :], alpha=-1)
        codes_OS[:, index], values_OS[:, index] = code_O, value_O
        errors_OB[:, column] = error_O
    return codes_OS, values_OS
