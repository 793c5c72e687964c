"""Tests of the tokenizer of a GGUF file: valid metadata, and metadata that is rejected."""

from __future__ import annotations

import json
import logging
import time

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer, models

from dovetail.errors import ModelError, RequestError
from dovetail.tokenizers import core_building, huggingface, tokenizer_trial
from dovetail_gguf.open_files import open_file
from dovetail_gguf.pre_tokenizers import PRE_TOKENIZERS
from dovetail_gguf.tokenizer import GGUFTokenizer
from dovetail_gguf.tokenizer_content import tokenizer_content
from dovetail_gguf.vocabulary import read_vocabulary

PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
ALPHABET = [
    *map(chr, PRINTABLE),
    *(chr(0x100 + index) for index in range(256 - len(PRINTABLE))),
]
"""The characters that stand for the 256 bytes in byte-level vocabularies."""
MERGES = ("h i", "\u0120 hi", "h e", "l l", "he ll", "hell o")
SPECIAL = ("<s>", "</s>", "<tool>")
EMPTY = json.loads(Tokenizer(models.BPE()).to_str())
PIECES = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)))
PIECES_OF_TEXT = (
    *("\u2581", *"helowrd", "he", "ll", "hell"),
    *("hello", "\u2581hello", "\u2581he"),
)


def write_bytes_vocabulary(path, *, pre="gpt-2", omit=(), num_rows=None, **changes):
    """Write a small byte-level vocabulary. changes: values that replace or add keys."""
    tokens = [*ALPHABET, *(merge.replace(" ", "") for merge in MERGES), *SPECIAL]
    types = [TokenType.NORMAL] * (len(tokens) - 3)
    types += [TokenType.CONTROL, TokenType.CONTROL, TokenType.USER_DEFINED]
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": types,
        "merges": list(MERGES),
        "bos_token_id": len(tokens) - 3,
        "eos_token_id": len(tokens) - 2,
    }
    return write(path, {**values, **changes}, omit, num_rows)


def write_pieces_vocabulary(path, *, omit=(), **changes):
    """Write a small SentencePiece vocabulary."""
    tokens = [*PIECES, *PIECES_OF_TEXT]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    types += [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(PIECES_OF_TEXT)
    values = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": [0.0] * len(PIECES) + [-float(index) for index in range(len(PIECES_OF_TEXT))],
    }
    return write(path, {**values, **changes}, omit)


def write(path, values, omit, num_rows=None):
    """Write a file with this metadata. num_rows: rows of the embedding; None for no tensors."""
    writer = GGUFWriter(path, "llama")
    if num_rows is not None:
        writer.add_tensor("token_embd.weight", np.zeros((num_rows, 32), dtype=np.float32))
    for key, value in values.items():
        name = key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}"
        if key in omit or value is None:
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
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path):
    return GGUFTokenizer.from_directory(path)


def names(tokenizer, text, **changes):
    return [tokenizer.decode([token]) for token in tokenizer.encode(text, **changes)]


def test_a_byte_level_vocabulary_splits_and_merges_words(tmp_path):
    tokenizer = load(write_bytes_vocabulary(tmp_path / "a.gguf"))
    assert names(tokenizer, "hello hi") == ["hello", " hi"]
    assert tokenizer.decode(tokenizer.encode("é 你好\n")) == "é 你好\n"


@pytest.mark.parametrize("write_vocabulary", [write_bytes_vocabulary, write_pieces_vocabulary])
def test_a_tokenizer_built_without_json_equals_that_of_its_tokenizer_json(
    write_vocabulary, tmp_path
):
    path = write_vocabulary(tmp_path / "a.gguf")
    content = tokenizer_content(read_vocabulary(open_file(path)))
    expected = Tokenizer.from_buffer(core_building.as_json(content))
    assert core_building.load_core(content).to_str() == expected.to_str()
    assert load(path).vocab_size == max(expected.get_vocab().values()) + 1


def test_a_tested_vocabulary_is_neither_written_as_json_nor_listed(tmp_path, monkeypatch):
    path = write_bytes_vocabulary(tmp_path / "a.gguf")
    load(path)
    written = []
    as_json = core_building.as_json
    monkeypatch.setattr(tokenizer_trial, "as_json", None)
    monkeypatch.setattr(huggingface, "count_ids", None)
    monkeypatch.setattr(core_building, "as_json", lambda c: written.append(c) or as_json(c))
    load(path)
    assert [content["model"]["vocab"] for content in written] == [{}]


def test_token_types_decide_which_tokens_are_special_or_added(tmp_path):
    tokenizer = load(write_bytes_vocabulary(tmp_path / "a.gguf"))
    ids = tokenizer.encode("<s>hi<tool></s>")
    assert [tokenizer.decode([token]) for token in ids] == ["<s>", "hi", "<tool>", "</s>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi<tool>"
    assert tokenizer.special_token_ids == {ids[0], ids[3]}
    assert tokenizer.eos_token_id == ids[3]


@pytest.mark.costly
@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_splits_a_text_without_changing_it(pre, tmp_path):
    tokenizer = load(write_bytes_vocabulary(tmp_path / "a.gguf", pre=pre, add_bos_token=False))
    text = "It's 12345 élan\n\n  你好 3.14 HTTPServer don't $+=`^~|"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["1234567", " DON", "'", "T", "\n", " x"]),
        ("smollm", ["1", "2", "3", "4", "5", "6", "7", " DON", "'", "T", "\n", " x"]),
        ("llama-bpe", ["123", "456", "7", " DON", "'T", "\n", " x"]),
        ("qwen2", ["1", "2", "3", "4", "5", "6", "7", " DON", "'T", "\n", " x"]),
        ("tekken", ["1", "2", "3", "4", "5", "6", "7", " DON", "'T", "\n", " x"]),
        ("gpt-4o", ["123", "456", "7", " DON'T", "\n", " x"]),
        ("deepseek-v3", ["123", "456", "7", " DON", "'T", "\n", " x"]),
        ("deepseek-llm", ["1", "2", "3", "4", "5", "6", "7", " DON", "'", "T", "\n", " x"]),
    ],
)
def test_a_pre_tokenizer_splits_numbers_and_contractions(pre, expected):
    steps = {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre].steps}
    core = Tokenizer.from_str(json.dumps({**EMPTY, "pre_tokenizer": steps}))
    words = core.pre_tokenizer.pre_tokenize_str("1234567 DON'T\n x")
    assert [word.replace("\u0120", " ").replace("\u010a", "\n") for word, _ in words] == expected


def test_deepseek_llm_splits_symbols_scripts_and_final_spaces():
    splits = PRE_TOKENIZERS["deepseek-llm"].steps[:-1]
    steps = {"type": "Sequence", "pretokenizers": splits}
    core = Tokenizer.from_str(json.dumps({**EMPTY, "pre_tokenizer": steps}))
    text = "na\u00efve \u03a9\u2126 +=a \u4f60\u597d\u3002\u10d0b \u201cq\u201d  "
    words = [word for word, _ in core.pre_tokenizer.pre_tokenize_str(text)]
    # The rule for symbols includes ASCII letters, the rule for CJK all of U+0800 to U+4E00, and
    # Georgian letters had no upper case.
    start = ["na", "\u00ef", "ve", " \u03a9", "\u2126", " +=", "a", " ", "\u4f60\u597d", "\u3002"]
    assert words == [*start, "\u10d0", "b", " ", "\u201c", "q", "\u201d", "  "]


def test_the_metadata_states_whether_bos_and_eos_are_added(tmp_path):
    def of(**changes):
        return names(load(write_bytes_vocabulary(tmp_path / "a.gguf", **changes)), "hi")

    assert of() == ["hi"]
    assert of(add_bos_token=True) == ["<s>", "hi"]
    assert of(add_bos_token=True, add_eos_token=True) == ["<s>", "hi", "</s>"]
    assert of(pre="llama-bpe") == ["<s>", "hi"]
    assert of(pre="llama-bpe", add_bos_token=False) == ["hi"]


@pytest.mark.parametrize(("best", "expected"), [("he", ["he", "l"]), ("el", ["h", "el"])])
def test_sentencepiece_merges_the_piece_with_the_highest_score_first(best, expected, tmp_path):
    pieces = ("h", "e", "l", "he", "el")
    tokens = [*PIECES, *pieces]
    path = write_pieces_vocabulary(
        tmp_path / "a.gguf",
        tokens=tokens,
        token_type=[2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        scores=[0.0] * len(PIECES) + [0.0 if piece == best else -1.0 for piece in pieces],
        add_space_prefix=False,
    )
    assert names(load(path), "hel", add_special_tokens=False) == expected


def test_sentencepiece_merges_neighboring_pieces(tmp_path):
    tokenizer = load(write_pieces_vocabulary(tmp_path / "a.gguf"))
    first = len(PIECES) + PIECES_OF_TEXT.index("\u2581hello")
    assert tokenizer.encode("hello he") == [1, first, first + 1]
    assert tokenizer.decode([first, first + 1]) == "hello he"


def test_sentencepiece_writes_unknown_characters_as_bytes(tmp_path):
    tokenizer = load(write_pieces_vocabulary(tmp_path / "a.gguf"))
    ids = tokenizer.encode("\u00e9", add_special_tokens=False)
    assert ids == [len(PIECES), 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(ids) == "\u00e9"


def test_the_space_prefix_can_be_disabled(tmp_path):
    with_prefix = load(write_pieces_vocabulary(tmp_path / "a.gguf"))
    without = load(write_pieces_vocabulary(tmp_path / "b.gguf", add_space_prefix=False))
    assert len(with_prefix.encode("d")) == 3  # BOS and the space
    assert len(without.encode("d")) == 2
    assert without.decode(without.encode(" d")[1:]) == " d"


def test_named_chat_templates_are_read(tmp_path):
    path = write_bytes_vocabulary(
        tmp_path / "a.gguf",
        **{
            "tokenizer.chat_template": "{{ bos_token }}default",
            "tokenizer.chat_template.tool_use": "tools",
        },
    )
    tokenizer = load(path)
    message = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(message) == "<s>default"
    assert tokenizer.apply_chat_template(message, tools=[{}]) == "tools"
    with pytest.raises(RequestError, match="no default chat template"):
        load(write_bytes_vocabulary(tmp_path / "b.gguf")).apply_chat_template(message)


def test_a_file_that_does_not_name_its_pre_tokenizer_causes_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        load(write_bytes_vocabulary(tmp_path / "a.gguf", omit=("pre",)))
    assert "does not state tokenizer.ggml.pre" in caplog.text


BAD = {
    "model": ("unigram", r"tokenizer\.ggml\.model is 'unigram'.*Supported: gpt2"),
    "pre": ("llama-bp", r"tokenizer\.ggml\.pre is 'llama-bp'.*llama-bpe"),
    "tokens": (["a", "b", "a"], r"token_type has 265 values for 3 tokens"),
    "token_type": ([1, 2, 3], r"token_type has 3 values"),
    "merges": (["ab"], r"merges contains 'ab', which is not a pair"),
    "bos_token_id": (1 << 20, r"bos_token_id is 1048576"),
    "eos_token_id": ("x", r"eos_token_id is 'x'"),
    "add_bos_token": (1, r"add_bos_token is 1; it must be of type bool"),
    "tokenizer.chat_template": (7, r"tokenizer\.chat_template is 7; it must be a string"),
}


@pytest.mark.parametrize("key", BAD)
def test_the_error_for_an_invalid_value_names_its_key(key, tmp_path):
    value, message = BAD[key]
    path = write_bytes_vocabulary(tmp_path / "bad.gguf", **{key: value})
    with pytest.raises(ModelError, match=rf"(?s)bad\.gguf.*{message}"):
        load(path)


@pytest.mark.parametrize("key", ["model", "tokens", "merges"])
def test_the_error_for_a_missing_key_names_it(key, tmp_path):
    path = write_bytes_vocabulary(tmp_path / "bad.gguf", omit=(key,))
    with pytest.raises(ModelError, match=rf"(?s)bad\.gguf.*tokenizer\.ggml\.{key}.*missing"):
        load(path)


def test_more_tokens_than_rows_of_the_embedding_are_rejected(tmp_path):
    load(write_bytes_vocabulary(tmp_path / "good.gguf", num_rows=265))
    path = write_bytes_vocabulary(tmp_path / "bad.gguf", num_rows=264)
    with pytest.raises(ModelError, match=r"bad\.gguf: .*tokens has 265 tokens.* only 264 rows"):
        load(path)


@pytest.mark.parametrize("write_vocabulary", [write_bytes_vocabulary, write_pieces_vocabulary])
def test_a_long_token_is_rejected_in_little_time(write_vocabulary, tmp_path):
    """The number of its splits times their length grows with the square of its length."""
    path = write_vocabulary(tmp_path / "bad.gguf", tokens=["<unk>", "x" * 200_000], token_type=None)
    start = time.process_time()
    with pytest.raises(
        ModelError, match=r"bad\.gguf: tokenizer\.ggml\.tokens .* 200000 characters.*is 16384"
    ):
        load(path)
    assert time.process_time() - start < 5


def test_many_long_pieces_of_sentencepiece_are_rejected(tmp_path):
    long = [f"{number}".ljust(12_000, "x") for number in range(4)]
    tokens = [*PIECES, *long]
    path = write_pieces_vocabulary(
        tmp_path / "bad.gguf",
        tokens=tokens,
        token_type=[2, 3, 3] + [6] * 256 + [1] * len(long),
        scores=[0.0] * len(tokens),
    )
    with pytest.raises(ModelError, match=r"bad\.gguf.*tokenizer\.ggml\.tokens are too long.*limit"):
        load(path)


def test_a_repeated_token_is_rejected(tmp_path):
    tokens = [*ALPHABET, "a"]
    path = write_bytes_vocabulary(
        tmp_path / "bad.gguf",
        tokens=tokens,
        token_type=[1] * len(tokens),
        bos_token_id=None,
        eos_token_id=None,
    )
    with pytest.raises(ModelError, match=r"bad\.gguf.*tokens has 'a' twice"):
        load(path)


def test_a_merge_that_contains_an_unknown_token_is_rejected(tmp_path):
    path = write_bytes_vocabulary(tmp_path / "bad.gguf", merges=["h i", "no where"])
    with pytest.raises(ModelError, match=r"(?s)bad\.gguf cannot be used.*no.*out of vocab"):
        load(path)


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_rejected(score, tmp_path):
    path = write_pieces_vocabulary(
        tmp_path / "bad.gguf", scores=[score] + [0.0] * (len(PIECES + PIECES_OF_TEXT) - 1)
    )
    with pytest.raises(ModelError, match=r"scores has the value (nan|inf) for the token 0"):
        load(path)
