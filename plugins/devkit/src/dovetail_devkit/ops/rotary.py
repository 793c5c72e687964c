"""A reference implementation of the rotary embedding, and a table for it.

torch is imported within functions.
Dimensions: T tokens, N heads, S head size, P positions, R rotary_dim, F half of rotary_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NUM_POSITIONS = 50


def rotary_table(rotary_dim: int, device: torch.device) -> torch.Tensor:
    """Return cosines, then sines, of positions · frequencies: float32 [NUM_POSITIONS, R]."""
    import torch

    frequency_F = 100.0 ** -(torch.arange(rotary_dim // 2) / (rotary_dim // 2)).double()
    angle_PF = torch.arange(NUM_POSITIONS)[:, None] * frequency_F
    return torch.cat((angle_PF.cos(), angle_PF.sin()), dim=-1).float().to(device)


def far_apart(first: int, count: int) -> list[int]:
    """Return large token positions, which differ from the tokens' indices in the step."""
    return [(31 * index + 7) % NUM_POSITIONS for index in range(first, first + count)]


def turned(x_TNS: torch.Tensor, cos_sin_TR: torch.Tensor) -> torch.Tensor:
    """Return x with the first R features of each head rotated (rotate-half layout)."""
    import torch

    size = cos_sin_TR.shape[-1]
    cos_T1F, sin_T1F = cos_sin_TR[:, None].chunk(2, dim=-1)
    left, right = x_TNS[..., :size].chunk(2, dim=-1)
    halves = (left * cos_T1F - right * sin_T1F, right * cos_T1F + left * sin_T1F)
    return torch.cat((*halves, x_TNS[..., size:]), dim=-1)
