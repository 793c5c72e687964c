"""A tokenizer of another format, saved as tokenizer.json, gives the same tokens."""

import json

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from dovetail.tokenizers.huggingface import HuggingFaceTokenizer, TokenizerFacts
from dovetail.tokenizers.saved_files import special_token_ids, tokenizer_files

TEXTS = ("The café's cat 😀 sat", " <eos> two  spaces\n", "")


def make_tokenizer(*, bos=None, eos=None, templates=None):
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(TEXTS, trainer)
    facts = TokenizerFacts(
        special_tokens={"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "absent"},
        eos_token_id=1,
        add_bos_token=bos,
        add_eos_token=eos,
        chat_templates=templates or {},
        added_tokens=(),
    )
    return HuggingFaceTokenizer(core, facts)


def save(tokenizer, folder):
    for name, content in tokenizer_files(tokenizer).items():
        (folder / name).write_text(content, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")


@pytest.mark.costly
@pytest.mark.parametrize("bos", [None, False, True])
@pytest.mark.parametrize("eos", [None, True])
def test_a_saved_tokenizer_adds_the_same_special_tokens(tmp_path, bos, eos):
    tokenizer = make_tokenizer(bos=bos, eos=eos)
    save(tokenizer, tmp_path)
    loaded = HuggingFaceTokenizer.from_directory(tmp_path)
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids[:1] == [0] if bos else ids[:1] != [0]
        assert loaded.encode(text) == oracle.encode(text) == ids
        assert oracle.decode(ids) == loaded.decode(ids) == tokenizer.decode(ids)
    assert special_token_ids(tokenizer) == {"bos_token": 0, "eos_token": 1}
    assert oracle.eos_token_id == loaded.eos_token_id == 1


@pytest.mark.parametrize(
    "templates", [{"default": "{{ 1 }}"}, {"default": "{{ 1 }}", "../tools": "{{ 2 }}"}]
)
def test_saved_chat_templates_are_read_again(tmp_path, templates):
    save(make_tokenizer(templates=templates), tmp_path)
    assert HuggingFaceTokenizer.from_directory(tmp_path).chat_templates == templates
    assert [path.name for path in tmp_path.parent.glob("*.jinja")] == []
