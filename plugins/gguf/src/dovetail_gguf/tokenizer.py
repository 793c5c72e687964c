"""The tokenizer `gguf`: vocabulary and chat templates from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from dovetail.errors import ModelError
from dovetail.model_files import MAX_TEMPLATE_BYTES
from dovetail.tokenizers.huggingface import (
    MAX_ADDITIONAL_TEMPLATES,
    HuggingFaceTokenizer,
    TokenizerFacts,
)
from dovetail.value_checks import shorten
from dovetail_gguf.open_files import open_file
from dovetail_gguf.reader import GGUFFile, find_file
from dovetail_gguf.tokenizer_content import tokenizer_content
from dovetail_gguf.vocabulary import Vocabulary, read_vocabulary

TOKENIZER_FILE = "tokenizer.json"
"""The file that is used if the GGUF file in the same directory has no vocabulary."""
_MODEL = "tokenizer.ggml.model"
_TEMPLATE = "tokenizer.chat_template"


class GGUFTokenizer(HuggingFaceTokenizer):
    """A tokenizer of the `tokenizers` library, built from a GGUF file."""

    @classmethod
    def from_directory(cls, path: Path, options: Mapping[str, Any] | None = None) -> Self:
        """Load from a GGUF file, or from the only GGUF file in a directory.

        options: the fields of `HuggingFaceOptions`. On failure, raises a ModelError that names the
            file.
        """
        file = open_file(find_file(Path(path)))
        if _MODEL not in file.metadata and (file.path.parent / TOKENIZER_FILE).is_file():
            return super().from_directory(file.path.parent, options)
        vocabulary = read_vocabulary(file)
        try:
            content = tokenizer_content(vocabulary)
        except ModelError as error:
            raise ModelError(f"{file.path} cannot be used: {error}.") from None
        return cls.from_content(file.path, content, _facts(file, vocabulary), options)


def _facts(file: GGUFFile, vocabulary: Vocabulary) -> TokenizerFacts:
    special = {name: vocabulary.tokens[token] for name, token in vocabulary.special_ids.items()}
    is_template = vocabulary.encoder is not None  # of the tokenizer.json
    return TokenizerFacts(
        special_tokens={name: text for name, text in special.items() if text},
        eos_token_id=vocabulary.special_ids.get("eos_token"),
        add_bos_token=None if is_template else vocabulary.adds_bos,
        add_eos_token=None if is_template else vocabulary.adds_eos,
        chat_templates=_read_templates(file),
        added_tokens=(),
        vocab_size=len(vocabulary.tokens),
    )


def _read_templates(file: GGUFFile) -> dict[str, str]:
    """Return the name and source of each template."""
    keys = {"default": _TEMPLATE} if _TEMPLATE in file.metadata else {}
    names = [key for key in file.metadata if key.startswith(f"{_TEMPLATE}.")]
    keys |= {key.removeprefix(f"{_TEMPLATE}."): key for key in names}
    if len(keys) > MAX_ADDITIONAL_TEMPLATES:
        raise ModelError(
            f"{file.path} has {len(keys)} chat templates; the limit is {MAX_ADDITIONAL_TEMPLATES}."
        )
    templates = {}
    for name, key in keys.items():
        template = file.metadata[key]
        if not isinstance(template, str):
            raise ModelError(f"{file.path}: {key} is {shorten(template)}; it must be a string.")
        if len(template.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
            raise ModelError(f"{file.path}: {key} is longer than {MAX_TEMPLATE_BYTES} bytes.")
        templates[name] = template
    return templates
