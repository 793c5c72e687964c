"""Converts a tokenizer that was read from another format to files in the Hugging Face format."""

from __future__ import annotations

import json
from typing import Any

from dovetail.tokenizers.huggingface import HuggingFaceTokenizer


def tokenizer_files(tokenizer: HuggingFaceTokenizer) -> dict[str, str]:
    """Return the name and content of each file: tokenizer.json, its settings, a chat template.

    The tokenizer in these files adds the same special tokens to a text as `tokenizer`.
    """
    facts = tokenizer._facts
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **facts.special_tokens,
    }
    content = json.loads(tokenizer._core.to_str())
    if tokenizer._around is not None:
        content["post_processor"] = _post_processor(tokenizer, *tokenizer._around)
    templates = facts.chat_templates
    files = {}
    if templates.keys() == {"default"}:
        files["chat_template.jinja"] = templates["default"]
    elif templates:
        config["chat_template"] = [
            {"name": name, "template": source} for name, source in templates.items()
        ]
    files["tokenizer.json"] = json.dumps(content, ensure_ascii=False)
    files["tokenizer_config.json"] = json.dumps(config, ensure_ascii=False, indent=2)
    return files


def special_token_ids(tokenizer: HuggingFaceTokenizer) -> dict[str, int]:
    """Return the ids of named special tokens, such as "eos_token" to 2."""
    pairs = ((name, tokenizer._id_of(name)) for name in tokenizer.special_tokens)
    return {name: token_id for name, token_id in pairs if token_id is not None}


def _post_processor(
    tokenizer: HuggingFaceTokenizer, before: list[int], after: list[int]
) -> dict[str, Any]:
    """Return the post-processor of tokenizer.json that adds tokens to each text."""
    tokens = {token_id: tokenizer._core.id_to_token(token_id) for token_id in (*before, *after)}

    def special(token_ids: list[int], type_id: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": tokens[i], "type_id": type_id}} for i in token_ids]

    def sequence(name: str, type_id: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": name, "type_id": type_id}}
        return [*special(before, type_id), text, *special(after, type_id)]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": [*sequence("A", 0), *sequence("B", 1)],
        "special_tokens": {
            text: {"id": text, "ids": [token_id], "tokens": [text]}
            for token_id, text in tokens.items()
        },
    }
