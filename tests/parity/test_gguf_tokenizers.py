"""Real vocabularies, written to GGUF files, give the ids, texts and prompts of transformers."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
from assets import fetch
from gguf_files.vocabularies import adds_bos, merges_of, write_vocabulary
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dovetail.engine.output.detokenizer import PieceDetokenizer, make_detokenizer
from dovetail.errors import RequestError
from dovetail_gguf.reader import GGUFFile
from dovetail_gguf.tokenizer import GGUFTokenizer
from dovetail_gguf.tokenizer_content import derive_merges
from dovetail_gguf.vocabulary import read_vocabulary
from parity.tokenizer_texts import all_texts

PRE = {
    "qwen3": "qwen2",
    "llama3_1": "llama-bpe",
    "llama3": "llama-bpe",
    "deepseek_v3": "deepseek-v3",
    "gptoss": "gpt-4o",
    "gpt4o": "gpt-4o",
    "llama2": None,
    "gemma3": None,
}
"""Maps a vocabulary to its pre-tokenizer; None for SentencePiece."""
LARGE = ("gemma3", "gptoss")
SPACE = "\u2581"
TEMPLATE = """\
{% if tools %}{{ bos_token }}tools: {{ tools | tojson }}
{% endif %}{% for one in messages %}[{{ one.role }}] {{ one.content | trim }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
"""The chat template for tokenizers without one."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city, e.g. Zürich",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
CONVERSATIONS = (
    [{"role": "user", "content": "What's the weather in Zürich? 😀"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi \n"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "2 < 3 & 4 > 1?"},
    ],
)


def texts_for(name):
    """Return the texts, for SentencePiece without U+2581, which it decodes as a space."""
    return [text for text in all_texts() if PRE[name] is not None or SPACE not in text]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak if name in LARGE else ()) for name in PRE],
)
def test_a_vocabulary_gives_the_same_ids_texts_and_prompts_as_transformers(name, tmp_path):
    folder = fetch(name)
    path = write_vocabulary(folder, tmp_path / "model.gguf", pre=PRE[name], template=TEMPLATE)
    ours = GGUFTokenizer.from_directory(path)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    check_ids_and_texts(ours, theirs, texts_for(name))
    source, config = (
        json.loads((folder / file).read_text(encoding="utf-8"))
        for file in ("tokenizer.json", "tokenizer_config.json")
    )
    bos = [theirs.bos_token_id] if adds_bos(source, config) else []
    assert ours.encode("hi") == [*bos, *theirs.encode("hi", add_special_tokens=False)]
    assert ours.eos_token_id == theirs.eos_token_id
    theirs.chat_template = theirs.chat_template or TEMPLATE
    check_prompts(ours, theirs)


def check_ids_and_texts(ours, theirs, texts):
    """Compare ids, decoded texts, and texts that are decoded token by token."""
    assert len(texts) >= 300
    for text in texts:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        decoded = theirs.decode(ids, clean_up_tokenization_spaces=False)
        assert ours.decode(ids) == decoded
        assert streamed(ours, ids) == decoded, text


def streamed(tokenizer, ids):
    """Return the text of tokens that arrive one by one."""
    detokenizer = make_detokenizer(tokenizer, [], skip_special_tokens=False)
    assert isinstance(detokenizer, PieceDetokenizer)
    return "".join([detokenizer.push([token]) for token in ids]) + detokenizer.flush()


def check_prompts(ours, theirs):
    now = datetime.now()
    for messages in CONVERSATIONS:
        for tools in (None, TOOLS):
            for prompt in (False, True):
                given = {"tools": tools, "add_generation_prompt": prompt}
                expected = theirs.apply_chat_template(messages, tokenize=False, **given)
                found = ours.apply_chat_template(messages, **given)
                assert found == expected or now.day != datetime.now().day
    with pytest.raises(RequestError):
        ours.apply_chat_template(CONVERSATIONS[0], chat_template="{{ raise_exception('no') }}")


def test_the_derived_sentencepiece_merges_equal_the_published_merges(tmp_path):
    folder = fetch("llama2")
    path = write_vocabulary(folder, tmp_path / "model.gguf", pre=None)
    published = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    assert derive_merges(read_vocabulary(GGUFFile(path))) == merges_of(published)


def test_the_tokenizer_of_smollm2_in_its_gguf_file_equals_that_of_transformers():
    (file,) = fetch("smollm2").iterdir()
    ours = GGUFTokenizer.from_directory(file)
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert (ours.eos_token_id, ours.vocab_size) == (theirs.eos_token_id, len(theirs))
    # transformers uses the pattern of GPT-2 for this vocabulary, which does not split numbers.
    texts = [text for text in all_texts() if not any(item.isnumeric() for item in text)]
    for text in texts:
        assert ours.encode(text) == theirs.encode(text), text
    assert [ours.decode([token]) for token in ours.encode("x 1234")] == ["x", " ", *"1234"]
    check_prompts(ours, theirs)


@pytest.mark.soak
def test_the_vocabulary_of_the_gguf_file_of_gemma_equals_the_published_vocabulary():
    (file,) = fetch("gemma3_270m").iterdir()
    ours = GGUFTokenizer.from_directory(file)
    theirs = PreTrainedTokenizerFast.from_pretrained(fetch("gemma3"))
    check_ids_and_texts(ours, theirs, [text for text in all_texts() if SPACE not in text])
