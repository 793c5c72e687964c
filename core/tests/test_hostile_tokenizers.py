"""Tokenizer files that crash the library, hang or use too much memory cause a typed error."""

import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import models

from dovetail import LLM
from dovetail.engine.input.tokenizer_checks import check_tokenizer
from dovetail.errors import ModelError, RequestError
from dovetail.tokenizers import huggingface, tokenizer_trial
from dovetail.tokenizers.core_building import PanicGuard, prepare_core
from dovetail.tokenizers.huggingface import HuggingFaceTokenizer
from dovetail_devkit.contexts import SMALL_ENGINE, write_fake_config

SEQUENCE_A, SEQUENCE_B = ({"Sequence": {"id": item, "type_id": 0}} for item in "AB")
TIGHT = {"tokenizer_timeout_s": 3, "tokenizer_memory_mib": 512}


def replace(pattern, content):
    kind = "Regex" if pattern.startswith("regex:") else "String"
    return {
        "type": "Replace",
        "pattern": {kind: pattern.removeprefix("regex:")},
        "content": content,
    }


def split(regex):
    pattern = {"Regex": regex}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def sequence(index, parts):
    return {"type": "Sequence", index: parts}


def template(single, tokens=None):
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [SEQUENCE_A, SEQUENCE_B],
        "special_tokens": tokens or {},
    }


def wide_token(num_ids):
    return {"x": {"id": "x", "ids": [0] * num_ids, "tokens": ["a"] * num_ids}}


BERT = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
BERT |= {"strip_accents": None, "lowercase": True}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False}
BYTE_LEVEL |= {"trim_offsets": True, "use_regex": False}


def unigram(num_pieces):
    vocabulary = [["a" * number, -1.0] for number in range(1, num_pieces + 1)]
    return {"type": "Unigram", "unk_id": 0, "vocab": vocabulary}


SPECIAL_X = {"SpecialToken": {"id": "x", "type_id": 0}}
DOUBLING = [replace("a", "aa")] * 40
REFUSED = {
    "a replacement that doubles, 40 times": {"normalizer": sequence("normalizers", DOUBLING)},
    "a replacement by a million": {"normalizer": replace("a", "a" * 1_000_000)},
    "a replacement of a rare character": {"normalizer": replace("\u1234", "a" * 1_000_000)},
    "a replacement between all characters": {"normalizer": replace("regex:", "a" * 100)},
    "a replacement of nothing": {"normalizer": replace("", "a" * 100)},
    "a nested sequence that doubles": {
        "normalizer": sequence("normalizers", [sequence("normalizers", DOUBLING)])
    },
    "a thousand texts before": {
        "normalizer": sequence("normalizers", [{"type": "Prepend", "prepend": "x" * 1000}] * 1000)
    },
    "a decoder that doubles": {"decoder": sequence("decoders", DOUBLING)},
    "a template of a text 10,000 times": {"post_processor": template([SEQUENCE_A] * 10_000)},
    "templates of templates": {
        "post_processor": sequence("processors", [template([SEQUENCE_A] * 4)] * 12)
    },
    "a special token of 100,000 ids": {
        "post_processor": template([SEQUENCE_A, SPECIAL_X], wide_token(100_000))
    },
    "a missing special token": {"post_processor": template([SEQUENCE_A, SPECIAL_X])},
    "a regex that backtracks without end": {"pre_tokenizer": split("(a+)+$")},
    "an invalid regex": {"pre_tokenizer": split("(?<x>")},
    "a regex of a rare character that backtracks": {"pre_tokenizer": split("(\u1234+)+$")},
    "a regex of escaped characters that backtracks": {
        "pre_tokenizer": split(r"(?:\x{1F3AF}|[\x{1F3A0}-\x{1F3BE}])*\x07")
    },
    "a regex of overlapping ranges that backtracks": {
        "normalizer": replace(r"regex:(?:[\u0440-\u0442]|[\u0441-\u0443])*\x07", "b")
    },
    "a regex that is slow wherever it starts": {
        "normalizer": replace(r"regex:(.+)\1\1\1+$", "b")
    },
    "200 normalizers": {"normalizer": sequence("normalizers", [{"type": "NFKC"}] * 200)},
    "nested byte levels": {
        "normalizer": sequence("normalizers", [{"type": "ByteLevel"}] * 4),
        "pre_tokenizer": sequence("pretokenizers", [BYTE_LEVEL] * 4),
    },
    "a long prefix of pieces": {
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}
        | {"continuing_subword_prefix": "#" * 1000}
    },
    "a long suffix of words": {
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "end_of_word_suffix": "#" * 1000}
    },
    "words of any length": {
        "model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a"}
        | {"continuing_subword_prefix": "", "max_input_chars_per_word": 10**9}
    },
    "pieces that are prefixes of one another": {
        "model": unigram(300)
    },
    "deep nesting": {"normalizer": None},
    "an id of 2**32-1": {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 2**32 - 1}, "merges": []}
    },
    "an id of 2**31": {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 2**31}, "merges": []}
    },
    "a token of 2 million characters": {
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b" * 2_000_000: 1}, "unk_token": "a"}
    },
    "an id beyond 32 bits": {"model": {"type": "BPE", "vocab": {"a": 2**40}, "merges": []}},
    "a merge of nothing": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "z"]]}},
    "an unknown model type": {"model": {"type": "Python"}},
    "an invalid charsmap": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}
    },
}  # fmt: skip


def write_tokenizer(folder, **parts):
    state = json.loads(Core(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>")).to_str())
    (folder / "tokenizer.json").write_text(json.dumps(state | parts))
    return folder


def rss_kib():
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


@pytest.mark.costly
@pytest.mark.parametrize("case", REFUSED)
def test_a_hostile_tokenizer_is_rejected_without_ending_the_process(tmp_path, case, monkeypatch):
    monkeypatch.setattr(tokenizer_trial, "PROBE_TIMEOUT_S", 0.6)
    write_tokenizer(tmp_path, **REFUSED[case])
    if case == "deep nesting":
        deep = '{"type":"Sequence","normalizers":[' * 100_000
        (tmp_path / "tokenizer.json").write_text('{"normalizer": ' + deep)
    before = rss_kib()
    with pytest.raises(ModelError) as rejection:
        HuggingFaceTokenizer.from_directory(tmp_path, options=TIGHT)
    message = str(rejection.value)
    assert str(tmp_path / "tokenizer.json") in message and "transformers" in message
    assert len(message) < 1000
    assert rss_kib() - before < 100 << 10


@pytest.mark.costly
@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": sequence("normalizers", [replace(" ", "\u2581")] * 20)},
        {"normalizer": sequence("normalizers", [replace("\u4f60", " \u4f60 "), replace("`", '"')])},
        {"normalizer": replace("regex: {2,}", " ")},
        {"decoder": sequence("decoders", [replace("\u2581", " "), {"type": "Fuse"}])},
        {"normalizer": {"type": "Prepend", "prepend": "\u2581"}},
        {"normalizer": BERT, "pre_tokenizer": {"type": "BertPreTokenizer"}},
        {"normalizer": {"type": "NFC"}, "pre_tokenizer": BYTE_LEVEL},
        {
            "model": {"type": "WordPiece", "vocab": {"a": 0, "##a": 1}, "unk_token": "a"}
            | {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
        },
        {"model": unigram(128)},
        {"pre_tokenizer": split(r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+")},
    ],
)  # fmt: skip
def test_components_of_ordinary_tokenizers_are_accepted(tmp_path, parts):
    write_tokenizer(tmp_path, **parts)
    assert len(HuggingFaceTokenizer.from_directory(tmp_path).encode("a")) == 1


def test_the_limits_of_the_tokenizer_can_be_set_by_options(tmp_path):
    # The library's search tree for these pieces needs about 200 bytes per character.
    pieces = [[chr(0x4E00 + number) + "a" * 15_000, -1.0] for number in range(80)]
    write_tokenizer(tmp_path, model={"type": "Unigram", "unk_id": 0, "vocab": pieces})
    for options, reason in (
        ({"tokenizer_timeout_s": 0.01}, r"longer than 0\.01 s.*tokenizer_timeout_s=0\.01"),
        ({"tokenizer_memory_mib": 128}, "memory"),
    ):
        with pytest.raises(ModelError, match=reason):
            HuggingFaceTokenizer.from_directory(tmp_path, options=options)
    write_fake_config(tmp_path)
    with pytest.raises(ModelError, match=r"longer than 0\.01 s"):
        LLM(
            tmp_path,
            worker_cls="dovetail_devkit.fakes.worker:FakeWorker",
            platform="dovetail_devkit.fakes.platform:FakePlatform",
            plugin_options={"huggingface": {"tokenizer_timeout_s": 0.01}},
            **SMALL_ENGINE,
        )


def test_a_text_that_the_library_cannot_encode_rejects_one_request(tmp_path):
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}
    write_tokenizer(tmp_path, model=model, pre_tokenizer=split(" "), added_tokens=[])
    tokenizer = HuggingFaceTokenizer.from_directory(tmp_path)
    assert tokenizer.encode("a") == [0]
    for text in ("never seen", "a never"):
        with pytest.raises(RequestError, match="cannot encode") as rejection:
            tokenizer.encode(text)
        assert rejection.value.parameter == "prompt"
    assert tokenizer.encode("a") == [0]


class Panicking:
    """A fake tokenizer that raises a panic of the library, which is not an `Exception`."""

    class PanicException(BaseException):  # the library uses this class name
        pass

    def __getattr__(self, name):
        def panic(*args, **options):
            raise self.PanicException("Onig: Regex search error: retry-limit-in-match over")

        return panic


def test_a_tokenizer_panic_rejects_the_request_or_gives_a_replacement_character(tmp_path):
    tokenizer = HuggingFaceTokenizer.from_directory(write_tokenizer(tmp_path))
    tokenizer._core, tokenizer._guarded = Panicking(), PanicGuard(Panicking())
    with pytest.raises(RequestError, match="retry-limit") as rejection:
        tokenizer.encode("a")
    assert rejection.value.parameter == "prompt"
    assert tokenizer.decode([1]) == "\ufffd"


def test_a_decoder_that_panics_at_one_token_does_not_affect_other_tokens(tmp_path):
    """The checks may miss one token of thousands on which the regex panics."""
    bad = "a" * 60 + "!"
    vocabulary = {"<unk>": 0, "b": 1, bad: 2} | {f"w{n}": n for n in range(3, 5000)}
    regex = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "c"}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    decoder = sequence("decoders", [regex, {"type": "Fuse"}])
    tokenizer = HuggingFaceTokenizer.from_directory(
        write_tokenizer(tmp_path, model=model, decoder=decoder)
    )
    assert tokenizer.decode([1]) == "b"
    assert tokenizer.decode([2]) == "\ufffd"
    pieces = tokenizer.token_pieces(skip_special_tokens=False)
    assert pieces is None or (pieces[1], pieces[4]) == ("b", "w4")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"added_tokens_decoder": {str(n): {"content": str(n)} for n in range(2000)}},
            "2000 entries",
        ),
        ({"added_tokens_decoder": {"9" * 5000: {"content": "x"}}}, "'999.*is not a token id"),
        ({f"a{n}_token": "a" for n in range(2000)}, "2000 special tokens"),
        ({"chat_template": 5}, "has 5; it must be a string"),
        ({"chat_template": ["x"]}, "has 'x'; it must be a string"),
        ({"chat_template": {"default": ["x"]}}, "the strings"),
        ({"chat_template": [{"name": 5, "template": "x"}]}, "the strings"),
        ({"chat_template": [{"name": str(n), "template": "x"} for n in range(65)]}, "65 templates"),
    ],
)
def test_tokens_and_templates_of_tokenizer_config_are_checked(
    tmp_path, config, reason, monkeypatch
):
    monkeypatch.setattr(huggingface, "MAX_ADDED_TOKENS", 1999)
    (write_tokenizer(tmp_path) / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=rf"tokenizer_config\.json.*{reason}") as rejection:
        HuggingFaceTokenizer.from_directory(tmp_path)
    assert len(str(rejection.value)) < 500


def test_added_tokens_are_added_in_one_call():
    """Each call rebuilds the token tree. 200,000 calls with one token each took 25 s."""
    core, calls = Core(models.WordLevel({"a": 0}, unk_token="a")), []

    class Counting(PanicGuard):
        def add_tokens(self, tokens):
            calls.append(len(tokens))
            return core.add_tokens(tokens)

    entries = [{"content": f"<t{n}>", "special": n % 2 == 0} for n in range(1000)]
    prepare_core(Counting(core), entries, ["<t0>", "<t1>", "absent"])
    assert calls == [1000]
    special = [token for token in core.get_added_tokens_decoder().values() if token.special]
    assert len(special) == 501


class Sparse:
    """A tokenizer with few tokens. One of them has the largest possible id."""

    vocab_size = 2**62
    special_token_ids = frozenset({5, 2**62 - 1})


def test_a_tokenizer_with_a_huge_vocabulary_is_checked_without_listing_its_ids():
    with pytest.raises(ModelError, match="belongs to another model"):
        check_tokenizer(Sparse(), 100)
    check_tokenizer(Sparse(), 2**62 - 1)
    with pytest.raises(ModelError, match="belongs to another model"):
        check_tokenizer(Sparse(), 2**62 - 2)


@pytest.mark.costly
def test_checks_of_large_files_are_recorded_in_a_private_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenizer_trial, "REMEMBERED_BYTES", 10)
    monkeypatch.setattr(tokenizer_trial, "MAX_REMEMBERED", 2)
    started = []

    class Counted(tokenizer_trial.BoundedChild):
        def __init__(self, *args):
            started.append(1)
            super().__init__(*args)

    monkeypatch.setattr(tokenizer_trial, "BoundedChild", Counted)

    def load():
        monkeypatch.setattr(tokenizer_trial, "_passed", set())
        HuggingFaceTokenizer.from_directory(tmp_path)
        return len(started)

    write_tokenizer(tmp_path)
    assert load() == load() == 1
    folder = tmp_path / "cache/dovetail/tokenizers"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)  # another user could have written to the directory
    assert load() == 2
    folder.chmod(0o700)
    assert load() == 2
    for number in range(3):
        write_tokenizer(tmp_path, normalizer=replace("x", str(number)))
        load()
    assert len(os.listdir(folder)) == 2
