"""A BERT encoder of a few kilobytes with random weights and a tokenizer, written without torch."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from dovetail_devkit.tiny_model import write_safetensors

WORDS = [f"w{number}" for number in range(58)]
HIDDEN, NUM_POSITIONS, NUM_LAYERS = 16, 40, 2
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def write_tiny_encoder(folder: Path, **fields: Any) -> Path:
    """Write a BERT checkpoint.

    fields: fields of config.json; num_labels adds a classification head.
    """
    is_classifier = "num_labels" in fields
    config = {
        "architectures": ["BertForSequenceClassification" if is_classifier else "BertModel"],
        "model_type": "bert",
        "vocab_size": len(_SPECIAL) + len(WORDS),
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 2,
        "max_position_embeddings": NUM_POSITIONS,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "pad_token_id": 0,
        **fields,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    prefix = "bert." if is_classifier else ""
    shapes = {prefix + name: shape for name, shape in _encoder_shapes(config).items()}
    if is_classifier:
        shapes |= {
            "bert.pooler.dense.weight": (HIDDEN, HIDDEN),
            "bert.pooler.dense.bias": (HIDDEN,),
        }
        shapes["classifier.weight"] = (config["num_labels"], HIDDEN)
        shapes["classifier.bias"] = (config["num_labels"],)
    write_safetensors(folder / "model.safetensors", shapes)
    _write_tokenizer(folder)
    return folder


def _encoder_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    inner = config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, count in (
        ("word", config["vocab_size"]),
        ("position", NUM_POSITIONS),
        ("token_type", 2),
    ):
        shapes[f"embeddings.{name}_embeddings.weight"] = (count, HIDDEN)
    linears = {
        "attention.self.query": (HIDDEN, HIDDEN),
        "attention.self.key": (HIDDEN, HIDDEN),
        "attention.self.value": (HIDDEN, HIDDEN),
        "attention.output.dense": (HIDDEN, HIDDEN),
        "intermediate.dense": (inner, HIDDEN),
        "output.dense": (HIDDEN, inner),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(NUM_LAYERS):
        base = f"encoder.layer.{layer}."
        for name, shape in linears.items():
            shapes |= {f"{base}{name}.weight": shape, f"{base}{name}.bias": shape[:1]}
        norms += [f"{base}attention.output.LayerNorm", f"{base}output.LayerNorm"]
    for name in norms:
        shapes |= {f"{name}.weight": (HIDDEN,), f"{name}.bias": (HIDDEN,)}
    return shapes


def _write_tokenizer(folder: Path) -> None:
    import tokenizers

    vocab = {word: index for index, word in enumerate((*_SPECIAL, *WORDS))}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    ends = (("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
    core.post_processor = tokenizers.processors.BertProcessing(*ends)
    core.add_special_tokens(list(_SPECIAL))
    core.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "BertTokenizer", "model_max_length": NUM_POSITIONS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def make_texts(count: int, seed: int = 0) -> list[str]:
    """Return texts of 1 to 15 words."""
    source = random.Random(seed)
    return [" ".join(source.choices(WORDS, k=source.randint(1, 15))) for _ in range(count)]
