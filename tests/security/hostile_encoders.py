"""Valid GGUF files of small encoders, to be damaged: with WordPiece, or with Unigram."""

from __future__ import annotations

import struct
from math import prod
from random import Random
from typing import Any

from gguf_files.encoder_vocabularies import make_charsmap
from security.gguf_parts import ARRAY, BOOL, F32, I32, STRING, U8, U32, Parts

HIDDEN, INNER, LAYERS, POSITIONS = 32, 64, 1, 64
NUM_ROWS = 16
"""Rows of the embedding, the same for both vocabularies."""
WORDPIECES = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "\u2581hello",
    "\u2581he",
    "llo",
    "\u2581<",
)
PIECES = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "\u2581hello", "\u2581", *"helo<s>")
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def make_encoder_parts(*, is_unigram: bool) -> Parts:
    """Return a BERT with one layer, of Q8_0 and F32."""
    tokens = tuple(dict.fromkeys(PIECES)) if is_unigram else WORDPIECES
    model = {
        "block_count": LAYERS,
        "context_length": POSITIONS,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": 4,
        "pooling_type": 1,
    }
    metadata: dict[str, tuple[int, Any]] = {"general.architecture": (STRING, "bert")}
    metadata |= {f"bert.{key}": (U32, value) for key, value in model.items()}
    metadata["bert.attention.layer_norm_epsilon"] = (F32, 1e-5)
    metadata["bert.attention.causal"] = (BOOL, False)
    metadata["split.count"] = (U32, 0)
    ggml: dict[str, tuple[int, Any]] = {
        "model": (STRING, "t5" if is_unigram else "bert"),
        "pre": (STRING, "default"),
        "tokens": (ARRAY, (STRING, list(tokens))),
        "token_type": (ARRAY, (I32, [3, 3, 3, 3, 3, *[1] * (len(tokens) - 5)])),
        "token_type_count": (U32, 2),
        "bos_token_id": (U32, 0 if is_unigram else 2),
        "eos_token_id": (U32, 2 if is_unigram else 3),
        "unknown_token_id": (U32, 3 if is_unigram else 1),
        "mask_token_id": (U32, 4),
        "add_bos_token": (BOOL, True),
    }
    if is_unigram:
        charsmap = list(make_charsmap({"A": "a", "e\u0301": "\u00e9"}))
        ggml["scores"] = (ARRAY, (F32, [-float(number) for number in range(len(tokens))]))
        ggml["precompiled_charsmap"] = (ARRAY, (U8, charsmap))
    else:
        ggml["normalizer.lowercase"] = (BOOL, True)
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in ggml.items()}
    metadata["tokenizer.chat_template"] = (STRING, TEMPLATE)
    tensors, data = _tensors(NUM_ROWS)
    return Parts(metadata=metadata, tensors=tensors, data=data)


def _tensors(num_tokens: int) -> tuple[list[list[Any]], bytes]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (HIDDEN, num_tokens),
        "token_types.weight": (HIDDEN, 2),
        "position_embd.weight": (HIDDEN, POSITIONS),
    }
    sizes = {"attn_q": HIDDEN, "attn_k": HIDDEN, "attn_v": HIDDEN, "attn_output": HIDDEN}
    norms = ["token_embd_norm"]
    for layer in range(LAYERS):
        linear = {name: (HIDDEN, size) for name, size in sizes.items()}
        linear |= {"ffn_up": (HIDDEN, INNER), "ffn_down": (INNER, HIDDEN)}
        for name, shape in linear.items():
            shapes[f"blk.{layer}.{name}.weight"] = shape
            shapes[f"blk.{layer}.{name}.bias"] = shape[1:]
        norms += [f"blk.{layer}.{name}" for name in ("attn_output_norm", "layer_output_norm")]
    shapes |= {f"{name}.{leaf}": (HIDDEN,) for name in norms for leaf in ("weight", "bias")}
    random, tensors, data = Random(0), [], b""
    for name, shape in shapes.items():
        is_plain = len(shape) == 1 or name.startswith(("position", "token_types"))
        if is_plain:
            kind, content = 0, struct.pack("<f", 0.5) * prod(shape)
        else:  # Q8_0: a float16 scale and 32 bytes
            blocks = (
                struct.pack("<e", 0.01) + random.randbytes(32) for _ in range(prod(shape) // 32)
            )
            kind, content = 8, b"".join(blocks)
        tensors.append([name, list(shape), kind, len(data)])
        data += content + bytes(-len(content) % 32)
    return tensors, data
