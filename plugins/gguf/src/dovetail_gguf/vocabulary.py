"""Reads and checks the vocabulary in the metadata of a GGUF file (`tokenizer.ggml.*`).

Lists must agree with each other and with the number of rows of the embedding.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dovetail.errors import ModelError
from dovetail.tokenizers.tokenizer_child import MAX_TOKEN_CHARS
from dovetail.value_checks import shorten
from dovetail_gguf.encoders.tokenizer_rules import (
    UNIGRAM,
    WORDPIECE,
    EncoderRules,
    is_sentencepiece,
    name_mask_token,
    read_rules,
    restore_wordpieces,
)
from dovetail_gguf.pre_tokenizers import PreTokenizer
from dovetail_gguf.reader import GGUFFile
from dovetail_gguf.vocabulary_metadata import MAX_TOKENS, VocabularyMetadata

BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
MODELS = {
    BYTE_LEVEL: "byte-level BPE",
    SENTENCEPIECE: "BPE of SentencePiece",
    WORDPIECE: "WordPiece",
    UNIGRAM: "Unigram of SentencePiece",
}
"""Supported values of `tokenizer.ggml.model`."""
MAX_SPLITS = 1 << 23
"""Maximum total number of ways to split each piece in two, over all pieces."""
MAX_SPLIT_CHARS = 1 << 29
"""Maximum total number of characters in both parts of all these splits."""
_SENTENCEPIECE_IDS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}
"""Default ids for files with a SentencePiece vocabulary that does not state ids."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A vocabulary. tokens, types, scores: by id. Only vocabularies of SentencePiece have scores.

    model: one of `MODELS`. merges: pairs in the order of their ranks. pre: of byte-level BPE, or
    None. special_ids: by the name of the variable of chat templates ("bos_token"). encoder: the
    rules of the tokenizer of an encoder, or None.
    """

    model: str
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[tuple[str, str]]
    pre: PreTokenizer | None
    special_ids: Mapping[str, int]
    adds_bos: bool
    adds_eos: bool
    adds_space_prefix: bool
    encoder: EncoderRules | None = None

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each token."""
        return {token: number for number, token in enumerate(self.tokens)}


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """Return the vocabulary. An invalid value raises a ModelError that names file and key."""
    source = VocabularyMetadata(file)
    model = _read_model(file, source)
    tokens = source.strings("tokens", MAX_TOKENS)
    longest = max(map(len, tokens))
    if longest > MAX_TOKEN_CHARS:
        raise source.rejection(
            f"tokens has a token of {longest} characters; the limit is {MAX_TOKEN_CHARS}"
        )
    table = file.tensors.get("token_embd.weight")
    if table is not None and len(tokens) > table.shape[0]:
        raise source.rejection(
            f"tokens has {len(tokens)} tokens, but token_embd.weight has only {table.shape[0]} rows"
        )
    types = source.token_types(len(tokens))
    has_scores = model in (SENTENCEPIECE, UNIGRAM)
    pre = source.pre_tokenizer() if model == BYTE_LEVEL else None
    defaults = _SENTENCEPIECE_IDS if model == SENTENCEPIECE else {}
    special_ids = source.special_ids(len(tokens), defaults)
    if model == WORDPIECE:
        if is_sentencepiece(tokens):
            raise source.rejection(
                f"model is {WORDPIECE!r} (WordPiece), but tokens has pieces of SentencePiece, as "
                "in files of CamemBERT, whose text cannot be tokenized correctly. Load the "
                "original checkpoint"
            )
        tokens = restore_wordpieces(tokens, types)
    if model == UNIGRAM:
        tokens, types = name_mask_token(tokens, types, special_ids)
    rules = read_rules(file, source, model, tokens, types, special_ids)
    vocabulary = Vocabulary(
        model=model,
        tokens=tokens,
        types=types,
        scores=source.scores(len(tokens)) if has_scores else (),
        merges=source.merges() if model == BYTE_LEVEL else (),
        pre=pre,
        special_ids=special_ids if rules is None else rules.special_ids | special_ids,
        adds_bos=source.value("add_bos_token", bool, default=pre is None or pre.adds_bos),
        adds_eos=source.value("add_eos_token", bool, default=False),
        adds_space_prefix=source.value("add_space_prefix", bool, default=model != BYTE_LEVEL),
        encoder=rules,
    )
    if len(vocabulary.ids) != len(tokens):
        twice = next(
            token for number, token in enumerate(tokens) if vocabulary.ids[token] != number
        )
        raise source.rejection(f"tokens has {shorten(twice)} twice")
    return vocabulary


def _read_model(file: GGUFFile, source: VocabularyMetadata) -> str:
    model = source.value("model", str, default=None)
    if model in MODELS:
        return str(model)
    description = "is missing" if model is None else f"is {shorten(model)}, which is not supported"
    supported = ", ".join(f"{name} ({what})" for name, what in MODELS.items())
    raise ModelError(
        f"{file.path}: tokenizer.ggml.model {description}. Supported: {supported}.\n"
        "Set the option tokenizer to a directory with a tokenizer.json, or skip_tokenizer_init."
    )
