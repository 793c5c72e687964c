"""Writes the vocabulary of a tokenizer.json to a GGUF file, by the rules of llama.cpp's converter.

Source: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

PRE = {
    "qwen3": "qwen2",
    "llama3": "llama-bpe",
    "llama3_1": "llama-bpe",
    "deepseek_v3": "deepseek-v3",
    "gptoss": "gpt-4o",
    "gpt4o": "gpt-4o",
}
"""Byte-level vocabularies, and the names of their pre-tokenizers."""
SENTENCEPIECE = ("llama2", "gemma3")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>|<unused\d+>|<(pad|mask|unk|bos|eos)>", re.DOTALL)


def write_vocabulary(folder: Path, path: Path, name: str, *, omit: str = "") -> Path:
    """Write the tokenizer in `folder` to the file `path`. omit: a key that is left out."""
    source = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    writer = GGUFWriter(path, "llama")
    tokens, types = _tokens(source)
    ids = {token: number for number, token in enumerate(tokens)}
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if name in SENTENCEPIECE:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(_scores(source, tokens))
        writer.add_add_space_prefix("Prepend" in json.dumps(source["normalizer"]))
        writer.add_unk_token_id(ids["<unk>"])
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(PRE[name])
        writer.add_token_merges([one if isinstance(one, str) else " ".join(one)
                                 for one in source["model"]["merges"]])  # fmt: skip
    for key, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        value = config.get(key)
        text = value["content"] if isinstance(value, dict) else value
        if text is not None and key != omit:
            add(ids[text])
    writer.add_add_bos_token(adds_bos(source, config))
    if config.get("chat_template"):
        writer.add_chat_template(config["chat_template"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def adds_bos(source: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return whether the original adds the token; its config overrides its post-processor."""
    stated: bool | None = config.get("add_bos_token")
    return "TemplateProcessing" in json.dumps(source["post_processor"]) if stated is None else stated


def _scores(source: Mapping[str, Any], tokens: list[str]) -> list[float]:
    """Return scores in the order of the merges; tokenizer.json does not have the scores."""
    made = ("".join(one.split(" ") if isinstance(one, str) else one)
            for one in source["model"]["merges"])  # fmt: skip
    ranks = {token: rank for rank, token in enumerate(dict.fromkeys(made))}
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def _tokens(source: Mapping[str, Any]) -> tuple[list[str], list[TokenType]]:
    vocab = dict(source["model"]["vocab"])
    added = {entry["id"]: entry for entry in source["added_tokens"]}
    names = {number: token for token, number in vocab.items()}
    names |= {number: entry["content"] for number, entry in added.items()}
    tokens, types = [], []
    for number in range(max(names) + 1):
        token, kind = names.get(number, f"[PAD{number}]"), TokenType.NORMAL
        if number not in names:
            kind = TokenType.UNUSED
        elif number in added:
            special = added[number]["special"] or _LOOKS_SPECIAL.fullmatch(token)
            kind = TokenType.CONTROL if special else TokenType.USER_DEFINED
            if token == "<unk>":
                kind = TokenType.UNKNOWN
            elif not special:
                token = token.replace("\u2581", " ")
        elif source["model"]["byte_fallback"] and _BYTE.fullmatch(token):
            kind = TokenType.BYTE
        tokens.append(token)
        types.append(kind)
    return tokens, types
