"""The parts that dense decoders share. A family is a choice among them; see docs/plugins/model.md.

shape.py: what config.json defines. norms.py, attention.py, mlp.py: the parts of a layer. blocks.py:
where the norms of a layer are. causal_lm.py: the model.
"""

from dovetail_models.decoder.blocks import (
    Block,
    BranchNormBlock,
    ParallelBlock,
    PostNormBlock,
    PreNormBlock,
    SandwichBlock,
    TwoNormParallelBlock,
)
from dovetail_models.decoder.causal_lm import Decoder, DecoderForCausalLM, PositionDecoder
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
)

__all__ = [
    "AttentionOptions",
    "Block",
    "BranchNormBlock",
    "Decoder",
    "DecoderForCausalLM",
    "DecoderShape",
    "GatedMLP",
    "ParallelBlock",
    "PlainMLP",
    "PositionDecoder",
    "PostNormBlock",
    "PreNormBlock",
    "Rope",
    "SandwichBlock",
    "TwoNormParallelBlock",
    "layer_norm",
    "norm_of_all_heads",
    "norm_of_each_head",
    "offset_rms_norm",
    "read_decoder_shape",
    "read_heads",
    "read_rope",
    "rms_norm",
]
