"""Tests of the tokenizers of encoders in GGUF files, with valid and with invalid metadata."""

from __future__ import annotations

import re

import pytest
from gguf import GGUFWriter, TokenType

from dovetail.errors import ModelError
from dovetail_gguf.tokenizer import GGUFTokenizer

START = "\u2581"
NORMAL, UNKNOWN, CONTROL = TokenType.NORMAL, TokenType.UNKNOWN, TokenType.CONTROL
USER, UNUSED = TokenType.USER_DEFINED, TokenType.UNUSED
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (f"{START}run", "ning", f"{START}cafe", f"{START}A", f"{START}a", f"{START}.", "n", "s")
PIECES = {
    "<s>": CONTROL,
    "<pad>": CONTROL,
    "</s>": CONTROL,
    "<unk>": UNKNOWN,
    f"{START}run": NORMAL,
    START: NORMAL,
    "ning": NORMAL,
    "n": NORMAL,
    "[PAD8]": UNUSED,
}


def write_pieces(path, tokens=(*SPECIAL, *WORDS), types=None, omit=(), **changes):
    """Write a vocabulary of WordPiece. changes: values that replace or add keys."""
    num_words = len(tokens) - len(SPECIAL)
    values = {
        "model": "bert",
        "tokens": list(tokens),
        "token_type": types or [*[CONTROL] * len(SPECIAL), *[NORMAL] * num_words],
    }
    return write(path, {**values, **changes}, omit)


def write_unigram(path, omit=(), **changes):
    """Write a vocabulary of Unigram, as the converter makes it from a SentencePiece model."""
    values = {
        "model": "t5",
        "tokens": [*PIECES],
        "token_type": [*PIECES.values()],
        "scores": [0.0, 0.0, 0.0, 0.0, -1.0, -3.0, -1.5, -4.0, -10000.0],
        "bos_token_id": 0,
        "eos_token_id": 2,
        "unknown_token_id": 3,
        "mask_token_id": 8,
    }
    return write(path, {**values, **changes}, omit)


def write(path, values, omit):
    writer = GGUFWriter(path, "bert")
    for key, value in values.items():
        name = f"tokenizer.ggml.{key}"
        if key in omit:
            continue
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def texts(tokenizer, text):
    """Return the texts of the tokens of `text`."""
    return [tokenizer.decode([token]) for token in tokenizer.encode(text)]


def rejected(path, message):
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        GGUFTokenizer.from_directory(path)
    assert path.name in str(caught.value)


def test_pieces_with_the_mark_of_a_start_are_words_and_the_others_continue_words(tmp_path):
    tokenizer = GGUFTokenizer.from_directory(write_pieces(tmp_path / "model.gguf"))
    ids = [2, 5, 6, 3]
    assert tokenizer.encode("running") == ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "running"
    assert tokenizer.encode("ning") == [2, 1, 3], "a continuation does not start a word"


@pytest.mark.costly
@pytest.mark.parametrize(
    ("tokens", "changes", "expected"),
    [
        (WORDS, {}, ["A", "[UNK]"]),
        (WORDS, {"normalizer.lowercase": True}, ["a", "cafe"]),
        (WORDS[:3] + WORDS[4:], {}, ["a", "cafe"]),
        (WORDS[:3] + WORDS[4:], {"normalizer.strip_accents": False}, ["a", "[UNK]"]),
        ((*WORDS[:3], *WORDS[4:], f"{START}caf\u00e9"), {}, ["a", "caf\u00e9"]),
        (WORDS[:3] + WORDS[4:], {"normalizer.lowercase": False}, ["[UNK]", "[UNK]"]),
    ],
    ids=["capitals", "stated", "no capitals", "stated accents", "accents", "stated capitals"],
)
def test_the_vocabulary_shows_whether_a_text_becomes_lower_case(
    tokens, changes, expected, tmp_path
):
    path = write_pieces(tmp_path / "model.gguf", (*SPECIAL, *tokens), **changes)
    tokenizer = GGUFTokenizer.from_directory(path)
    assert texts(tokenizer, "A caf\u00e9")[1:-1] == expected


def test_tokens_in_brackets_of_older_files_have_no_mark(tmp_path):
    tokens = (*SPECIAL, "[unused0]", *WORDS)
    tokenizer = GGUFTokenizer.from_directory(write_pieces(tmp_path / "model.gguf", tokens))
    assert tokenizer.decode([5, 6]) == "[unused0] run"


def test_a_wordpiece_vocabulary_may_contain_the_mark_of_sentencepiece(tmp_path):
    pieces = (*SPECIAL, *WORDS, 2 * START)
    tokenizer = GGUFTokenizer.from_directory(write_pieces(tmp_path / "model.gguf", pieces))
    assert texts(tokenizer, f"run {START}") == ["[CLS]", "run", START, "[SEP]"]


def test_added_words_of_a_file_are_found_in_a_text(tmp_path):
    types = [*[CONTROL] * len(SPECIAL), USER, *[NORMAL] * (len(WORDS) - 1)]
    tokenizer = GGUFTokenizer.from_directory(write_pieces(tmp_path / "model.gguf", types=types))
    assert tokenizer.encode("arun") == [2, 9, 5, 3], "inside of a word too"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [2, 9, 3]),
        ({"add_bos_token": False}, [9, 3]),
        ({"add_eos_token": False}, [2, 9]),
        ({"cls_token_id": 4, "seperator_token_id": 0}, [4, 9, 0]),
        ({"bos_token_id": 4, "eos_token_id": 0}, [4, 9, 0]),
    ],
)
def test_the_special_tokens_around_a_text_are_those_of_the_metadata(changes, expected, tmp_path):
    tokenizer = GGUFTokenizer.from_directory(write_pieces(tmp_path / "model.gguf", **changes))
    assert tokenizer.encode("a") == expected


def test_the_second_text_of_a_pair_has_another_type_in_wordpiece_but_not_in_unigram(tmp_path):
    tokenizer = GGUFTokenizer.from_directory(write_pieces(tmp_path / "model.gguf"))
    assert tokenizer.encode_pair("a", "run") == ([2, 9, 3, 5, 3], 3)
    tokenizer = GGUFTokenizer.from_directory(write_unigram(tmp_path / "other.gguf"))
    assert tokenizer.encode_pair("run", "run") == ([0, 4, 2, 2, 4, 2], 0)


def test_the_most_likely_pieces_of_unigram_are_chosen(tmp_path):
    tokenizer = GGUFTokenizer.from_directory(write_unigram(tmp_path / "model.gguf"))
    assert tokenizer.encode("running \n x") == [0, 4, 6, 5, 3, 2]
    assert tokenizer.decode([4, 6, 4]) == "running run"


def test_an_unused_token_in_place_of_the_mask_token_gets_its_text(tmp_path):
    tokenizer = GGUFTokenizer.from_directory(write_unigram(tmp_path / "model.gguf"))
    assert tokenizer.encode("run  <mask>") == [0, 4, 8, 2]
    assert tokenizer.special_tokens["mask_token"] == "<mask>"


@pytest.mark.parametrize(
    ("omit", "changes", "message"),
    [
        (("bos_token_id",), {"tokens": ["x", *[*PIECES][1:]]}, "cls_token_id is missing"),
        (("scores",), {}, "tokenizer.ggml.scores is missing"),
        ((), {"scores": [0.0] * 8 + [float("nan")]}, "scores has the value nan"),
        ((), {"eos_token_id": 9}, "eos_token_id is 9, but there are 9 tokens"),
        ((), {"unknown_token_id": "x"}, "unknown_token_id is 'x'"),
        ((), {"precompiled_charsmap": [1, 256]}, "precompiled_charsmap has the value 256"),
        ((), {"precompiled_charsmap": "x"}, "precompiled_charsmap is 'x'; it must be a list"),
        ((), {"precompiled_charsmap": [0.5]}, "precompiled_charsmap has 0.5"),
        ((), {"precompiled_charsmap": [255] * 8}, "model.gguf"),
        ((), {"tokens": [*[*PIECES][:6], "n", "n", "x"]}, "tokens has 'n' twice"),
        ((), {"add_eos_token": 1}, "add_eos_token is 1; it must be of type bool"),
    ],
)
def test_the_error_for_invalid_metadata_of_unigram_names_the_key(omit, changes, message, tmp_path):
    rejected(write_unigram(tmp_path / "model.gguf", omit, **changes), message)


@pytest.mark.parametrize(
    ("tokens", "changes", "message"),
    [
        (("[PAD]", "[UNK]", "CLS", "[SEP]", "x", *WORDS), {}, "cls_token_id is missing"),
        (("[PAD]", "UNK", "[CLS]", "[SEP]", "x", *WORDS), {}, "unknown_token_id is missing"),
        ((*SPECIAL, *WORDS, f"{START}a"), {}, "tokens has 'a' twice"),
        ((*SPECIAL, *WORDS), {"normalizer.lowercase": "yes"}, "normalizer.lowercase is 'yes'"),
        ((*SPECIAL, *WORDS), {"model": "wpm"}, "tokenizer.ggml.model is 'wpm'"),
        (
            (*SPECIAL, *(START + word for word in WORDS)),
            {},
            "tokenizer.ggml.model is 'bert' (WordPiece), but tokens has pieces of SentencePiece",
        ),
    ],
)
def test_the_error_for_invalid_metadata_of_wordpiece_names_the_key(
    tokens, changes, message, tmp_path
):
    rejected(write_pieces(tmp_path / "model.gguf", tokens, **changes), message)
