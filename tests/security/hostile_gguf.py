"""Damaged GGUF files: a small valid file in which some parts are replaced by invalid data."""

from __future__ import annotations

import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from random import Random
from typing import Any

from security.gguf_parts import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U8,
    U16,
    U32,
    U64,
    Parts,
    WrongLengthValue,
)
from security.hostile_encoders import make_encoder_parts

SPECIAL = ("<unk>", "<s>", "</s>")
WORDS = ("he", "ll", "hell", "hello", "\u0120hello")
HIDDEN, INNER, LAYERS = 32, 64, 1
NUM_EXPERTS, EXPERT_INNER = 4, 32
EXTREMES = (0, 1, 2, 3, 7, 31, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
LARGE = (*EXTREMES, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
NAMES = (
    "",
    "x" * 300,
    "blk.0.attn_q.weight",
    "blk.99.ffn_up.weight",
    "blk.0.ffn_up_exps.weight",
    "blk.0.attn_k_b.weight",
)
LISTS = tuple(
    f"tokenizer.ggml.{key}"
    for key in ("tokens", "token_type", "merges", "scores", "precompiled_charsmap")
)
SPLIT = 4
"""If the number of a damaged file has this last digit, the file is a split model."""
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TEMPLATES = (
    "{% for m in messages %}",
    "{{ missing.field.of.nothing }}",
    "{{ 'a' * 300000000 }}",
    "{% for i in range(300000000) %}x{% endfor %}",
    "{{ ''.__class__.__mro__ }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "(" * 5000,
    "{{ " + "-" * 20000 + "1 }}",
    "\ud7ff\x00{{ messages[99].content }}",
    "{% include '/etc/passwd' %}",
    "x" * (1 << 21),
)


def make_valid(*, has_experts: bool = False) -> Parts:
    """Return a Llama, or a Qwen 3 with experts, with one layer and a byte-level vocabulary."""
    architecture = "qwen3moe" if has_experts else "llama"
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [*map(chr, printable), *(chr(0x100 + n) for n in range(256 - len(printable)))]
    tokens = [*alphabet, *WORDS, *SPECIAL]
    merges = ["h e", "l l", "he ll", "hell o", "\u0120 hello"]
    model = {
        "block_count": LAYERS,
        "context_length": 64,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "rope.dimension_count": 8,
    }
    if has_experts:
        model |= {
            "expert_count": NUM_EXPERTS,
            "expert_used_count": 2,
            "expert_feed_forward_length": EXPERT_INNER,
        }
    metadata: dict[str, tuple[int, Any]] = {"general.architecture": (STRING, architecture)}
    metadata |= {f"{architecture}.{key}": (U32, value) for key, value in model.items()}
    metadata[f"{architecture}.attention.layer_norm_rms_epsilon"] = (F32, 1e-5)
    metadata["general.alignment"] = (U32, 32)
    metadata["split.count"] = (U32, 0)
    ggml: dict[str, tuple[int, Any]] = {
        "model": (STRING, "gpt2"),
        "pre": (STRING, "llama-bpe"),
        "tokens": (ARRAY, (STRING, tokens)),
        "token_type": (ARRAY, (I32, [*[1] * (len(tokens) - 3), 2, 3, 3])),
        "merges": (ARRAY, (STRING, merges)),
        "scores": (ARRAY, (F32, [-float(n) for n in range(len(tokens))])),
        "bos_token_id": (U32, len(tokens) - 2),
        "eos_token_id": (U32, len(tokens) - 1),
        "unknown_token_id": (U32, len(tokens) - 3),
        "add_bos_token": (BOOL, True),
        "add_space_prefix": (BOOL, False),
    }
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in ggml.items()}
    metadata["tokenizer.chat_template"] = (STRING, TEMPLATE)
    tensors, data = _tensors(len(tokens), has_experts=has_experts)
    return Parts(metadata=metadata, tensors=tensors, data=data)


_DENSE = {"ffn_gate": (HIDDEN, INNER), "ffn_up": (HIDDEN, INNER), "ffn_down": (INNER, HIDDEN)}
_EXPERTS = {
    "attn_q_norm": (8,),
    "attn_k_norm": (8,),
    "ffn_gate_inp": (HIDDEN, NUM_EXPERTS),
    "ffn_gate_exps": (HIDDEN, EXPERT_INNER, NUM_EXPERTS),
    "ffn_up_exps": (HIDDEN, EXPERT_INNER, NUM_EXPERTS),
    "ffn_down_exps": (EXPERT_INNER, HIDDEN, NUM_EXPERTS),
}


def _tensors(num_tokens: int, *, has_experts: bool) -> tuple[list[list[Any]], bytes]:
    shapes = {"token_embd.weight": (HIDDEN, num_tokens), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, 32),
            f"blk.{layer}.attn_k.weight": (HIDDEN, 16),
            f"blk.{layer}.attn_v.weight": (HIDDEN, 16),
            f"blk.{layer}.attn_output.weight": (32, HIDDEN),
        }
        mlp = _EXPERTS if has_experts else _DENSE
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in mlp.items()}
    random, tensors, data = Random(0), [], b""
    for name, shape in shapes.items():
        num_values = prod(shape)
        if len(shape) == 1:
            kind, content = 0, struct.pack("<f", 1.0) * num_values
        else:  # Q8_0: a float16 scale and 32 bytes
            kind, blocks = 8, num_values // 32
            content = b"".join(
                struct.pack("<e", 0.01) + random.randbytes(32) for _ in range(blocks)
            )
        tensors.append([name, list(shape), kind, len(data)])
        data += content + bytes(-len(content) % 32)
    return tensors, data


def make_variant(number: int) -> Parts:
    """Return a valid file: in turn one with experts, a Llama, and an encoder of two kinds."""
    if number % 3 == 2:
        return make_encoder_parts(is_unigram=number % 2 == 0)
    return make_valid(has_experts=number % 3 == 0)


def damage(number: int) -> bytes:
    """Return the content of the damaged file `number`. The same number gives the same bytes."""
    random, parts = Random(number), make_variant(number)
    kind = DAMAGES[number % len(DAMAGES)]
    if kind is not None:
        kind(random, parts)
        return parts.to_bytes()
    content = bytearray(parts.to_bytes())
    head = len(content) - len(parts.data)
    match random.randrange(3):
        case 0:
            del content[random.randrange(len(content)) :]
        case 1:
            for _ in range(random.randrange(1, 20)):
                content[random.randrange(head)] = random.randrange(256)
        case 2:
            index = random.randrange(head - 8)
            content[index : index + 8] = struct.pack("<Q", random.choice(LARGE))
    return bytes(content)


def damage_split(number: int) -> list[bytes]:
    """Return the content of two parts of a model, one of them damaged."""
    random, first = Random(number), make_variant(number)
    half = len(first.tensors) // 2
    second = Parts(
        metadata={key: first.metadata[key] for key in ("general.architecture", "split.count")},
        tensors=first.tensors[half:],
        data=first.data,
    )
    first.tensors = first.tensors[:half]
    for index, part in enumerate((first, second)):
        part.metadata |= {
            "split.count": (U16, 2),
            "split.no": (U16, index),
            "split.tensors.count": (I32, len(first.tensors) + len(second.tensors)),
        }
    kinds = (_damage_head, _damage_value, _damage_size, _damage_tensor)
    random.choice(kinds)(random, random.choice((first, second)))
    return [first.to_bytes(), second.to_bytes()]


def _damage_head(random: Random, parts: Parts) -> None:
    match random.randrange(5):
        case 0:
            parts.magic = random.choice((b"GGML", b"\x00" * 4, b"FUGG"))
        case 1:
            parts.version = random.choice((0, 1, 2, 4, 1 << 24, 3 << 24))
        case 2:
            parts.counts[random.randrange(2)] = random.choice(LARGE)
        case 3:
            parts.metadata["general.alignment"] = (U32, random.choice(EXTREMES))
        case 4:
            key = random.choice(("split.count", "split.no", "split.tensors.count"))
            parts.metadata["split.count"] = (U32, random.choice(EXTREMES))
            parts.metadata[key] = (U32, random.choice(EXTREMES))


def _damage_value(random: Random, parts: Parts) -> None:
    """Replace a value by a value of a different type or by an extreme value."""
    key = random.choice([*parts.metadata])
    parts.metadata[key] = random.choice(
        (
            (U32, random.choice(EXTREMES)),
            (I32, -random.randrange(1 << 31)),
            (F32, random.choice((0.0, -1.0, float("nan"), float("inf"), 1e38))),
            (STRING, random.choice(("", "x" * 70000, b"\xff\xfe\x00"))),
            (BOOL, random.random() < 0.5),
            (ARRAY, (U32, [random.choice(EXTREMES)] * random.randrange(4))),
            (random.choice((13, 99, 1 << 31)), 0),
        )
    )


def _damage_size(random: Random, parts: Parts) -> None:
    """State a wrong length of a string, or a wrong count or type of an array."""
    keys = [key for key, (kind, _) in parts.metadata.items() if kind in (STRING, ARRAY)]
    key = random.choice(keys)
    kind, value = parts.metadata[key]
    if kind == ARRAY and random.random() < 0.5:
        inner, items = value
        if random.random() < 0.5:
            parts.metadata[key] = (ARRAY, (inner, items[: random.randrange(len(items))]))
        else:
            other = random.choice((U8, U32, U64, F32, ARRAY, 77))
            parts.metadata[key] = (ARRAY, WrongLengthValue((other, []), count=random.choice(LARGE)))
        return
    parts.metadata[key] = (kind, WrongLengthValue(value, count=random.choice(LARGE)))


def _damage_tensor(random: Random, parts: Parts) -> None:
    first = random.choice(parts.tensors)
    match random.randrange(6):
        case 0:
            first[0] = random.choice(NAMES)
        case 1:
            first[1][random.randrange(len(first[1]))] = random.choice(LARGE)
        case 2:
            first[1] = [random.choice((1, 2, 32))] * random.choice((0, 3, 4, 5, 1000))
        case 3:
            first[2] = random.choice((*range(45), 1 << 31))
        case 4:
            first[3] = random.choice((*LARGE, len(parts.data), len(parts.data) - 32))
        case 5:
            parts.tensors.remove(first)


def _damage_vocabulary(random: Random, parts: Parts) -> None:
    """Change one token, type, merge, score or id of the vocabulary, or the whole list."""
    lists = [key for key in LISTS if key in parts.metadata]
    key = random.choice(lists)
    kind, (inner, items) = parts.metadata[key]
    if random.random() < 0.3:
        parts.metadata["tokenizer.ggml.model"] = (
            STRING,
            random.choice(("llama", "bert", "gpt2", "t5")),
        )
    changed = list(items)
    invalid: tuple[Any, ...] = {
        STRING: ("", "a", " ", "x x", "no where", b"\xc3", "y" * 100_000, "\x00", "<s>", "\u2581"),
        I32: (0, 2, 3, 4, 5, 6, 7, -1, 1 << 30),
        F32: (float("nan"), float("-inf"), 1e38),
        U8: (0, 1, 127, 255),
    }[inner]
    for _ in range(random.choice((1, 1, 5, 50))):
        changed[random.randrange(len(changed))] = random.choice(invalid)
    if random.random() < 0.1:
        changed *= random.choice((0, 2, 100))
    parts.metadata[key] = (kind, (inner, changed))


def _damage_ids(random: Random, parts: Parts) -> None:
    key = random.choice(("bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id"))
    parts.metadata[f"tokenizer.ggml.{key}"] = (U32, random.choice(EXTREMES))
    if random.random() < 0.3:
        parts.metadata["tokenizer.ggml.pre"] = (STRING, random.choice(("default", "", "x" * 9000)))


def _damage_template(random: Random, parts: Parts) -> None:
    parts.metadata["tokenizer.chat_template"] = (STRING, random.choice(TEMPLATES))
    for number in range(random.choice((0, 0, 1, 100))):
        parts.metadata[f"tokenizer.chat_template.{number}"] = (STRING, random.choice(TEMPLATES[:2]))


DAMAGES: tuple[Callable[[Random, Parts], None] | None, ...] = (
    *(None, _damage_head, _damage_value, _damage_size, _damage_tensor),
    *(_damage_vocabulary, _damage_vocabulary, _damage_ids, _damage_tensor, _damage_template),
)


def write_damaged(folder: Path, number: int) -> list[Path]:
    """Write the damaged file `number`. One in ten is a split model. Return the paths."""
    contents = damage_split(number) if number % 10 == SPLIT else [damage(number)]
    ending = "" if len(contents) == 1 else "-{:05}-of-00002"
    paths = []
    for index, content in enumerate(contents, start=1):
        path = folder / f"damaged{number}{ending.format(index)}.gguf"
        path.write_bytes(content)
        paths.append(path)
    return paths
