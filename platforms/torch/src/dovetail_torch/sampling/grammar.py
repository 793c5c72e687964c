"""The tokens that grammars allow in a step, as a mask on some rows of the logits.

This module does not depend on how grammars are compiled. Bits are read as bytes, to be independent
of the byte order. Dimensions: S rows of the batch, V vocabulary, G constrained rows, B bytes of a
row's bit mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from dovetail.errors import ContractError
from dovetail.interfaces.worker import GrammarOutput
from dovetail_torch.sampling.device_access import Upload


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarMask:
    """The tokens that are allowed for some rows of a batch.

    index_G: indices of the rows in the batch, int64. bits_GB: uint8, bit t % 8 of byte t // 8 is 1
    if token t is allowed. Both are on the logits' device.
    """

    index_G: torch.Tensor
    bits_GB: torch.Tensor

    @classmethod
    def of(
        cls, grammar: GrammarOutput, runs: Sequence[int], vocab_size: int, upload: Upload
    ) -> GrammarMask:
        """Return the masks in `grammar` for the requests that are sampled.

        runs[i]: the position in the plan of the request whose logits are row i of the batch.
        upload: sends the masks to the logits' device.
        Raises ContractError if the bit mask does not have the required length.
        """
        row_bytes = 4 * ((vocab_size + 31) // 32)
        demanded = row_bytes * len(grammar.runs)
        if len(grammar.bitmask) != demanded:
            raise ContractError(
                f"a bit mask for {len(grammar.runs)} requests and {vocab_size} tokens must have "
                f"{demanded} bytes, but has {len(grammar.bitmask)}; use ceil(vocab_size / "
                "32) words of 4 bytes per request."
            )
        index_of = {run: index for index, run in enumerate(runs)}
        all_bits_GB = np.frombuffer(grammar.bitmask, np.uint8).reshape(-1, row_bytes)
        has_token_G = all_bits_GB.view(np.uint32).any(axis=1).tolist()
        taken = [i for i, run in enumerate(grammar.runs) if run in index_of and has_token_G[i]]
        bits_GB = all_bits_GB[taken]
        index_G = np.array([index_of[grammar.runs[i]] for i in taken], np.int64)
        return cls(index_G=upload(index_G), bits_GB=upload(bits_GB))

    def apply(self, logits_SV: torch.Tensor, mask: MaskTokens) -> None:
        """Set forbidden tokens to -inf, in place. mask: function of the op provider."""
        if len(self.index_G):
            mask(logits_SV, self.index_G, self.bits_GB)


MaskTokens = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""The operation `Ops.mask_tokens`."""


def mask_tokens(logits_SV: torch.Tensor, rows_G: torch.Tensor, bits_GB: torch.Tensor) -> None:
    """Set the logits of forbidden tokens to -inf, in place. See `Ops.mask_tokens`."""
    table = _bias_table(logits_SV.device, logits_SV.dtype)
    bias_GV = table[bits_GB.int()].flatten(1)
    logits_SV.index_add_(0, rows_G, bias_GV[:, : logits_SV.shape[1]])


@cache
def _bias_table(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return what is added to the logits of 8 tokens for each byte of a mask: 0 or -inf."""
    values_N1 = torch.arange(256, device=device).unsqueeze(1)
    allowed_N8 = values_N1 >> torch.arange(8, device=device) & 1
    bias_N8 = torch.zeros(256, 8, dtype=dtype, device=device)
    return bias_N8.masked_fill(allowed_N8 == 0, -torch.inf)
