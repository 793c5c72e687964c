"""The layers of models, the linear method `torch` and the op provider `torch`."""

from dovetail_torch.layers.activation import (
    ACTIVATIONS,
    Activation,
    GatedActivation,
    GeluTanhAndMul,
    SiluAndMul,
    gated_activation,
)
from dovetail_torch.layers.attention import (
    Attention,
    BidirectionalAttention,
    ChunkedAttention,
    LatentAttention,
    attention_layers,
    cache_layers,
    replicate_kv_heads,
)
from dovetail_torch.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from dovetail_torch.layers.experts import (
    ExpertShape,
    FusedExperts,
    Router,
    SeparateExperts,
    make_experts,
)
from dovetail_torch.layers.linear import (
    BlockWeight,
    ColumnParallelLinear,
    HeadShape,
    MergedColumnParallelLinear,
    ParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    linear_layers,
    pack_linears,
)
from dovetail_torch.layers.norm import LayerNorm, Norm, OffsetRMSNorm, RMSNorm
from dovetail_torch.layers.rotary import RotaryEmbedding
from dovetail_torch.layers.state import CausalConv, StateLayer
from dovetail_torch.layers.torch_linear import TorchLinearMethod
from dovetail_torch.layers.torch_ops import CompletedOps, TorchOps

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "Attention",
    "BidirectionalAttention",
    "BlockWeight",
    "CausalConv",
    "ChunkedAttention",
    "ColumnParallelLinear",
    "CompletedOps",
    "ExpertShape",
    "FusedExperts",
    "GatedActivation",
    "GeluTanhAndMul",
    "HeadShape",
    "LatentAttention",
    "LayerNorm",
    "MergedColumnParallelLinear",
    "Norm",
    "OffsetRMSNorm",
    "ParallelLMHead",
    "ParallelLinear",
    "QKVParallelLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "Router",
    "RowParallelLinear",
    "SeparateExperts",
    "SiluAndMul",
    "StateLayer",
    "TorchLinearMethod",
    "TorchOps",
    "VocabParallelEmbedding",
    "attention_layers",
    "cache_layers",
    "gated_activation",
    "linear_layers",
    "make_experts",
    "pack_linears",
    "replicate_kv_heads",
]
