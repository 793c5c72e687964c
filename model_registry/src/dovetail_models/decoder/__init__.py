"""The parts that dense decoders share. A family combines them; see docs/plugins/model.md.

shape.py: what config.json defines. norms.py, attention.py, latent_attention.py, mlp.py, experts.py:
the parts of a layer. state_branch.py: what recurrent layers share. blocks.py: where the norms of
a layer are. causal_lm.py: the model.
"""

from dovetail_models.decoder.attention import SelfAttention
from dovetail_models.decoder.blocks import (
    Block,
    BranchNormBlock,
    ParallelBlock,
    PostNormBlock,
    PreNormBlock,
    SandwichBlock,
    TwoNormParallelBlock,
)
from dovetail_models.decoder.causal_lm import (
    Decoder,
    DecoderForCausalLM,
    EmbeddingNormDecoder,
    PositionDecoder,
)
from dovetail_models.decoder.experts import (
    ExpertOptions,
    SparseMLP,
    read_num_experts,
    read_sparse_layers,
    read_top_k,
    sparse_mlp,
)
from dovetail_models.decoder.latent_attention import (
    LatentOptions,
    LatentSelfAttention,
    latent_attention,
)
from dovetail_models.decoder.mlp import GatedMLP, PlainMLP
from dovetail_models.decoder.norms import (
    layer_norm,
    norm_of_all_heads,
    norm_of_each_head,
    offset_rms_norm,
    rms_norm,
)
from dovetail_models.decoder.shape import (
    AttentionOptions,
    DecoderShape,
    Rope,
    read_decoder_shape,
    read_heads,
    read_rope,
    read_rotary_layers,
)

__all__ = [
    "AttentionOptions",
    "Block",
    "BranchNormBlock",
    "Decoder",
    "DecoderForCausalLM",
    "DecoderShape",
    "EmbeddingNormDecoder",
    "ExpertOptions",
    "GatedMLP",
    "LatentOptions",
    "LatentSelfAttention",
    "ParallelBlock",
    "PlainMLP",
    "PositionDecoder",
    "PostNormBlock",
    "PreNormBlock",
    "Rope",
    "SandwichBlock",
    "SelfAttention",
    "SparseMLP",
    "TwoNormParallelBlock",
    "latent_attention",
    "layer_norm",
    "norm_of_all_heads",
    "norm_of_each_head",
    "offset_rms_norm",
    "read_decoder_shape",
    "read_heads",
    "read_num_experts",
    "read_rope",
    "read_rotary_layers",
    "read_sparse_layers",
    "read_top_k",
    "rms_norm",
    "sparse_mlp",
]
