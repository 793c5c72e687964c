"""Small tokenizers of encoders, of transformers' classes, trained on texts of the repository.

The vocabularies have few words, so that most words are divided into several tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import transformers
from gguf_files.encoder_vocabularies import make_charsmap
from tokenizers import AddedToken as TrainedToken
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AddedToken, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from parity.tokenizer_texts import all_texts

VOCAB_SIZE = 700
BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
XLM_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
REPLACEMENTS = {
    **{chr(0xFF21 + number): chr(0x41 + number) for number in range(26)},
    **{"\t": " ", "\n": " ", "\r": " ", "\u00a0": " ", "\u3000": " ", "\u200b": "", "\x00": ""},
    **{
        "\ufb01": "fi",
        "\u00bd": "1\u20442",
        "e\u0301": "\u00e9",
        "\u2126": "\u03a9",
        "\ufb00": "ff",
    },
    **{"\u2460": "1", "\u338f": "kg", "\u2121": "TEL", "\u00b2": "2", "\ufeff": "", "\u2028": " "},
}
"""A part of the normalization of XLM-R."""
HOSTILE = (
    "café CAFÉ cafe\u0301 naïve Ångström ÀÉÎÕÜ çñß Straße İıſ",
    "日本語とEnglishの混在 中文字符,标点。한국어",
    "a\x00b\x01c\x7fd\x80e\u200bf\ufffdg\u200d\u2060\u00ad",
    "\u202eright to left\u202c \u0000",
    "😀😃 👩\u200d🚀 🇩🇪 👍🏽 \U0001f9ff",
    "x" * 99 + " " + "x" * 100 + " " + "x" * 101 + " " + "é" * 101,
    "unbelievable" * 30,
    "[CLS] text [SEP] [MASK] [PAD] [UNK] [unused1] [cls] ##ing ##",
    "<s> a </s> <mask> <pad> <unk> <MASK> a<mask>b  <mask>",
    "word\u2581word \u2581 \u2581\u2581word ##word",
    "\ud7ff\ue000\U0010ffff \u0378 \ufdd0",
    "a" + "\u0301" * 50 + "b",
    "\t\n\r\x0b\x0c\x85\u2028\u2029\u3000 x \u1680\u2000y",
    "ﬁ ½ ² Ⅷ ① ㎏ ℡ Ω ﷺ",
    "don't can't I'M they'RE $5.00 50% a+b=c ~`^|<>",
    "ΑΒΓ ΣΊΣΥΦΟΣ ЁЖИК ĲǄ ẞ",
)


def hostile_texts() -> list[str]:
    """Return at least 300 texts, with those above and the empty text."""
    return [*HOSTILE, *all_texts()]


def _bert(*, cased: bool, strip_accents: bool | None = None) -> PreTrainedTokenizerBase:
    trained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.normalizer = normalizers.BertNormalizer(
        lowercase=not cased, strip_accents=strip_accents
    )
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=BERT_SPECIAL, show_progress=False
    )
    trained.train_from_iterator(hostile_texts(), trainer)
    return transformers.BertTokenizer(
        vocab=trained.get_vocab(), do_lower_case=not cased, strip_accents=strip_accents
    )


def _xlm_roberta() -> PreTrainedTokenizerBase:
    charsmap = make_charsmap(REPLACEMENTS)
    trained = Tokenizer(models.Unigram())
    trained.normalizer = normalizers.Precompiled(charsmap)
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=XLM_SPECIAL, unk_token="<unk>", show_progress=False
    )
    trained.train_from_iterator(all_texts(), trainer)
    pairs = json.loads(trained.to_str())["model"]["vocab"]
    vocab = [*((token, 0.0) for token in XLM_SPECIAL), *map(tuple, pairs[len(XLM_SPECIAL) :])]
    return transformers.XLMRobertaTokenizer(
        vocab=[*vocab, ("<mask>", 0.0)],
        mask_token=AddedToken("<mask>", lstrip=True, special=True),
        _spm_precompiled_charsmap=charsmap,
    )


def _train_bytes(
    special: list[str | TrainedToken], normalizer: normalizers.Normalizer | None
) -> Tokenizer:
    trained = Tokenizer(models.BPE())
    if normalizer is not None:
        trained.normalizer = normalizer
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(all_texts(), trainer)
    return trained


def _roberta() -> PreTrainedTokenizerBase:
    model = json.loads(_train_bytes([*XLM_SPECIAL, "<mask>"], None).to_str())["model"]
    return transformers.RobertaTokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        mask_token=AddedToken("<mask>", lstrip=True, special=True),
    )


def _modern_bert() -> PreTrainedTokenizerBase:
    mask = TrainedToken("[MASK]", lstrip=True, special=True)
    trained = _train_bytes([*BERT_SPECIAL[:-1], mask], normalizers.NFC())
    first, last = "[CLS]", "[SEP]"
    trained.post_processor = processors.TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0",
        pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
        special_tokens=[(text, trained.token_to_id(text)) for text in (first, last)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=trained,
        cls_token=first,
        sep_token=last,
        pad_token="[PAD]",
        unk_token="[UNK]",
        mask_token="[MASK]",
    )


TOKENIZERS: Mapping[str, tuple[Callable[[], PreTrainedTokenizerBase], str, str]] = {
    "bert, uncased": (lambda: _bert(cased=False), "bert", "jina-v2-en"),
    "bert, cased": (lambda: _bert(cased=True), "bert", "default"),
    "bert, accents": (lambda: _bert(cased=False, strip_accents=False), "bert", "default"),
    "xlm-roberta": (_xlm_roberta, "bert", "default"),
    "roberta": (_roberta, "bert", "roberta-bpe"),
    "modern-bert": (_modern_bert, "modern-bert", "modern-bert"),
}
"""The maker of each tokenizer, and the names of its architecture and pre-tokenizer in files."""


def save_tokenizer(name: str, folder: Path) -> PreTrainedTokenizerBase:
    """Make a tokenizer, save it to `folder`, and return it."""
    tokenizer = TOKENIZERS[name][0]()
    tokenizer.save_pretrained(folder)
    return tokenizer
