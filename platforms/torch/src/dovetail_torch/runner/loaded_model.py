"""A loaded model, its properties that do not depend on the KV cache, and its dummy runs.

Memory is measured with a dummy run before the cache is sized; the model runner is created
afterwards, from the same object. This module does not depend on rows, plans or the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dovetail.interfaces import Model
from dovetail_torch.attention_table import NoAttention
from dovetail_torch.pooling.pooler import PoolerHead
from dovetail_torch.positions import PositionTables
from dovetail_torch.runner.device_parts import TORCH_PARTS, DeviceParts
from dovetail_torch.runner.device_rows import DeviceRows
from dovetail_torch.runner.step_limits import StepLimits
from dovetail_torch.runner.warm_up import draw_for_all
from dovetail_torch.sampling import Sampler
from dovetail_torch.sampling.device_access import plain_access

_SMALL_BLOCK = 16
"""Block size of the block tables that are measured; tables of larger blocks are smaller."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model and the sizes of its steps.

    num_layers: number of attention layers and recurrent layers. vocab_size: width of its logits.
    tables: the model's position tables. device_parts: objects of the platform and the op provider.
    head: not None if the model pools.
    """

    model: Model
    num_layers: int
    vocab_size: int
    limits: StepLimits
    tables: PositionTables
    device_parts: DeviceParts = TORCH_PARTS
    head: PoolerHead | None = None

    @torch.inference_mode()
    def dummy_run(self, num_tokens: int, num_sampled: int) -> None:
        """Run the model on `num_tokens` tokens without a cache, and its head on `num_sampled`.

        Changes no state. It needs the time and the memory of a step of that size.
        """
        limits, parts = self.limits, self.device_parts
        self.tables.grow(num_tokens)
        input_ids_T = torch.zeros(num_tokens, dtype=torch.int64, device=limits.device)
        positions_T = torch.arange(num_tokens, device=limits.device) % limits.max_model_len
        context = NoAttention(self.num_layers, num_tokens, num_sampled)
        hidden_TD = self.model.forward(input_ids_T, positions_T, context)
        if self.head is not None:
            self.head.dummy(hidden_TD, num_sampled)
            return
        logits_SV = self.model.compute_logits(hidden_TD[:num_sampled])
        if parts.asynchronous is None:
            logits_SV.argmax(dim=-1)
            return
        # An asynchronous device fails if a step exceeds the measured memory. Therefore sampling and
        # the rows, which exist for the engine's lifetime, are included.
        rows = DeviceRows(
            num_rows=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            block_sizes=(_SMALL_BLOCK,),
            device=limits.device,
        )
        sampler = Sampler(
            num_rows=limits.max_num_seqs,
            vocab_size=self.vocab_size,
            device=limits.device,
            best_tokens=parts.best_tokens,
            mask_tokens=parts.mask_tokens,
            access=plain_access(limits.device, parts.draw_tokens),
        )
        draw_for_all(sampler, logits_SV)
        del rows
