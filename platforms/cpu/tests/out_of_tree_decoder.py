"""Decoders as a third party would write them, using only the layers of dovetail_torch.

No test imports this file: `hf_overrides` names its path, as a user would.

Shapes: T tokens, S samples, D hidden.
"""

import torch
from torch import nn

from dovetail.interfaces.model import Model
from dovetail_torch.layers import (
    Attention,
    ColumnParallelLinear,
    HeadShape,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    SiluAndMul,
    VocabParallelEmbedding,
)


class CustomNormsLayer(nn.Module):
    """A decoder layer with one weight for both norms, followed by a linear layer with a bias."""

    CONTRACT, CONTRACT_VERSION = "model", Model.CONTRACT_VERSION
    architectures = ("CustomNormsLayer",)

    def __init__(self, context):
        super().__init__()
        config, size = context.hf_config, context.hf_config["hidden_size"]
        heads = HeadShape(num_heads=4, num_kv_heads=2, head_size=config["head_dim"])
        self.table = VocabParallelEmbedding(context, config["vocab_size"], size)
        self.qkv = QKVParallelLinear(context, "qkv", size, heads)
        self.out = RowParallelLinear(context, "out", 4 * config["head_dim"], size)
        self.up = MergedColumnParallelLinear(context, "up", size, {"a": 96, "b": 96})
        self.act = SiluAndMul(context)
        self.down = RowParallelLinear(context, "down", 96, size)
        self.mix = ColumnParallelLinear(context, "mix", size, size, bias=True)
        self.norm = RMSNorm(context, size, 1e-6)
        self.rotary = RotaryEmbedding(context, config["head_dim"])
        self.attn = Attention(heads, 0)
        self.head = ParallelLMHead(context, "head", config["vocab_size"], size)

    def forward(self, input_ids_T, positions_T, attention):
        residual_TD = self.table(input_ids_T)
        q, k, v = self.qkv.split(self.qkv(self.norm(residual_TD)))
        q, k = self.rotary(q, k, positions_T)
        x_TD = self.out(self.attn(q, k, v, attention))
        x_TD, residual_TD = self.norm.add(x_TD, residual_TD)
        x_TD = self.norm.add(self.down(self.act(self.up(x_TD))), residual_TD)[0]
        return self.between(self.mix(x_TD))

    def between(self, x_TD):
        return x_TD

    def compute_logits(self, hidden_SD):
        return self.head(hidden_SD)


class MixedOpsLayer(CustomNormsLayer):
    """A decoder layer that runs one torch operation between native operations."""

    architectures = ("MixedOpsLayer",)

    def between(self, x_TD):
        return x_TD * 0.5


class HiddenCopyLayer(CustomNormsLayer):
    """A decoder layer that copies data through memory unknown to torch."""

    architectures = ("HiddenCopyLayer",)

    def between(self, x_TD):
        return torch.from_numpy(x_TD.view(torch.int16).numpy().copy()).view(torch.bfloat16)
