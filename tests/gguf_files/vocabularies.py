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

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>|<unused\d+>|<(pad|mask|unk|bos|eos)>", re.DOTALL)


def write_vocabulary(folder: Path, path: Path, *, pre: str | None, template: str = "") -> Path:
    """Write the tokenizer in `folder` to the file `path`, without a model.

    pre: name of the pre-tokenizer of a byte-level vocabulary; None for SentencePiece. template:
    chat template of a tokenizer that has none.
    """
    writer = GGUFWriter(path, "llama")
    add_vocabulary(writer, folder, pre=pre, template=template)
    finish(writer)
    return path


def finish(writer: GGUFWriter) -> None:
    """Write everything to the file and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(
    writer: GGUFWriter, folder: Path, *, pre: str | None, template: str = ""
) -> None:
    """Add the metadata of a tokenizer. The arguments are the same as for `write_vocabulary`."""
    source = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokens, types = _tokens(source)
    ids = {token: number for number, token in enumerate(tokens)}
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if pre is None:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(_scores(source, tokens))
        writer.add_add_space_prefix("Prepend" in json.dumps(source["normalizer"]))
        writer.add_unk_token_id(ids["<unk>"])
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(pair) for pair in merges_of(source)])
    for key, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        value = config.get(key)
        text = value["content"] if isinstance(value, dict) else value
        if text is not None:
            add(ids[text])
    writer.add_add_bos_token(adds_bos(source, config))
    if config.get("chat_template") or template:
        writer.add_chat_template(config.get("chat_template") or template)


def merges_of(source: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the merges of a tokenizer.json, which are pairs or strings with a space."""
    return [
        tuple(item.split(" ") if isinstance(item, str) else item)
        for item in source["model"]["merges"]
    ]


def adds_bos(source: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return whether the original tokenizer adds the token, by its config or post-processor."""
    stated: bool | None = config.get("add_bos_token")
    return (
        "TemplateProcessing" in json.dumps(source["post_processor"]) if stated is None else stated
    )


def _scores(source: Mapping[str, Any], tokens: list[str]) -> list[float]:
    """Return scores in the order of the merges. Tokenizer.json does not have the scores."""
    created = map("".join, merges_of(source))
    ranks = {token: rank for rank, token in enumerate(dict.fromkeys(created))}
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
