"""The names and layouts of the tensors of encoders in GGUF files.

Source: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py
"""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.interfaces import WeightMapping
from dovetail_gguf.encoders.architecture_names import MODERN_BERT

_QKV = tuple(f"self_attn.{part}_proj" for part in "qkv")
_HEAD = {"cls.output": ("out_proj",), "cls.norm": ("norm",), "cls": ("dense",)}
"""The parts of a classification head. "cls" is also the start of the other names."""
_ROOT = {
    "token_embd_norm": ("embed_norm",),
    "token_embd": ("embed_tokens",),
    "token_types": ("embed_types",),
    "position_embd": ("embed_positions",),
    "output_norm": ("norm",),
}
_LAYER = {
    "attn_qkv": _QKV,
    "attn_q": _QKV[:1],
    "attn_k": _QKV[1:2],
    "attn_v": _QKV[2:],
    "attn_output": ("self_attn.o_proj",),
    "ffn_down": ("mlp.down_proj",),
}
_POST_NORM = _LAYER | {
    "attn_output_norm": ("input_layernorm",),
    "layer_output_norm": ("post_attention_layernorm",),
    "ffn_gate": ("mlp.gate_proj",),
    "ffn_up": ("mlp.up_proj",),
}
_PRE_NORM = _LAYER | {
    "attn_norm": ("input_layernorm",),
    "ffn_norm": ("post_attention_layernorm",),
    "ffn_up": ("mlp.gate_proj", "mlp.up_proj"),
}


def encoder_mappings(name: str, *, has_head: bool) -> list[WeightMapping]:
    """Return the mappings of the tensors of the architecture `name` to the modules of the model.

    has_head: whether the model classifies; otherwise a head, such as that of a masked language
    model, is not used.
    """
    is_modern = name == MODERN_BERT
    prefix = "model." if is_modern else ""
    head = _HEAD if has_head else dict.fromkeys(_HEAD, ())
    layer: Mapping[str, tuple[str, ...]] = _PRE_NORM if is_modern else _POST_NORM
    return [
        *(WeightMapping(source=source, targets=targets) for source, targets in head.items()),
        *(
            WeightMapping(source=source, targets=tuple(f"{prefix}{own}" for own in targets))
            for source, targets in _ROOT.items()
        ),
        *(
            WeightMapping(
                source=f"blk.{{}}.{source}",
                targets=tuple(f"{prefix}layers.{{}}.{own}" for own in targets),
            )
            for source, targets in layer.items()
        ),
    ]
