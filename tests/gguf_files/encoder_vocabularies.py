"""Writes the vocabularies of encoders to GGUF files, by the rules of llama.cpp's converter.

Source: https://github.com/ggml-org/llama.cpp/blob/master/conversion/bert.py
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, SpecialVocab, TokenType

SPACE = "\u2581"
UNUSED_SCORE = -10000.0


def write_encoder_vocabulary(
    folder: Path,
    path: Path,
    *,
    architecture: str = "bert",
    pre: str = "default",
    change: Callable[[GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write the tokenizer in `folder` to the file `path`, without a model. change: adds keys."""
    writer = GGUFWriter(path, architecture)
    add_encoder_vocabulary(writer, folder, pre=pre)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def add_encoder_vocabulary(writer: GGUFWriter, folder: Path, *, pre: str = "default") -> None:
    """Add the metadata of the tokenizer in `folder`. pre: the name of its pre-tokenizer."""
    source = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    kind = source["model"]["type"]
    add = {"WordPiece": _add_wordpiece, "Unigram": _add_unigram, "BPE": _add_bytes}[kind]
    num_tokens = add(writer, source)
    writer.add_tokenizer_pre(pre)
    special = SpecialVocab(folder, load_merges=kind == "BPE", n_vocab=num_tokens)
    special.add_to_gguf(writer, quiet=True)


def _add_wordpiece(writer: GGUFWriter, source: Mapping[str, Any]) -> int:
    tokens, types = _tokens(source, source["model"]["vocab"])
    writer.add_tokenizer_model("bert")
    marked = [
        token if kind == TokenType.CONTROL else _marked(token)
        for token, kind in zip(tokens, types, strict=True)
    ]
    writer.add_token_list(marked)
    writer.add_token_types(types)
    return len(tokens)


def _marked(token: str) -> str:
    """Return a piece with the mark of a word's start instead of that of its continuation."""
    return token[2:] if token.startswith("##") else SPACE + token


def _add_bytes(writer: GGUFWriter, source: Mapping[str, Any]) -> int:
    tokens, types = _tokens(source, source["model"]["vocab"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    return len(tokens)


def _add_unigram(writer: GGUFWriter, source: Mapping[str, Any]) -> int:
    pairs = source["model"]["vocab"]
    tokens, types = _tokens(source, {token: number for number, (token, _) in enumerate(pairs)})
    scores = [score for _, score in pairs]
    types[source["model"]["unk_id"]] = TokenType.UNKNOWN
    writer.add_tokenizer_model("t5")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores + [UNUSED_SCORE] * (len(tokens) - len(scores)))
    writer.add_token_types(types)
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(False)
    charsmap = (source["normalizer"] or {}).get("precompiled_charsmap")
    if charsmap:
        writer.add_precompiled_charsmap(b64decode(charsmap))
    return len(tokens)


def _tokens(
    source: Mapping[str, Any], vocab: Mapping[str, int]
) -> tuple[list[str], list[TokenType]]:
    names = {number: token for token, number in vocab.items()}
    added = {entry["id"]: entry for entry in source["added_tokens"]}
    names |= {number: entry["content"] for number, entry in added.items()}
    tokens, types = [], []
    for number in range(max(names) + 1):
        kind = TokenType.NORMAL
        if number not in names:
            kind = TokenType.UNUSED
        elif number in added:
            kind = TokenType.CONTROL if added[number]["special"] else TokenType.USER_DEFINED
        tokens.append(names.get(number, f"[PAD{number}]"))
        types.append(kind)
    return tokens, types


def make_charsmap(replacements: Mapping[str, str]) -> bytes:
    """Return a normalization of SentencePiece: a trie as a double array, and the new texts.

    A unit of the array has the label of its edge, whether a value follows, and the offset of its
    children. Each node has a block of 256 units here, so that no two nodes conflict.
    Source: https://github.com/google/sentencepiece, `third_party/darts_clone/darts.h`.
    """
    texts, starts = b"", {}
    for old, new in replacements.items():
        starts[old.encode()] = len(texts)
        texts += new.encode() + b"\0"
    prefixes = {key[:length] for key in starts for length in range(len(key) + 1)}
    blocks = {prefix: 256 * (1 + number) for number, prefix in enumerate(sorted(prefixes))}
    units = [0] * (256 * (len(blocks) + 1))
    units[0] = blocks[b""] << 10
    for prefix, block in blocks.items():
        if prefix:
            place = blocks[prefix[:-1]] ^ prefix[-1]
            has_value = prefix in starts
            units[place] = (place ^ block) << 10 | has_value << 8 | prefix[-1]
        if prefix in starts:
            units[block] = 1 << 31 | starts[prefix]
    array = b"".join(unit.to_bytes(4, "little") for unit in units)
    return len(array).to_bytes(4, "little") + array + texts
