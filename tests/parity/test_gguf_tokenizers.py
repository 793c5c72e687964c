"""Real vocabularies in GGUF files give the same ids, texts and prompts as in transformers."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
from assets import fetch
from gguf_files.vocabularies import adds_bos, merges_of, write_vocabulary
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dovetail.engine.output.detokenizer import PieceDetokenizer, make_detokenizer
from dovetail.errors import RequestError
from dovetail.tokenizers.saved_files import tokenizer_files
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


@pytest.mark.costly
@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak if name in LARGE else ()) for name in PRE],
)
def test_a_vocabulary_gives_the_same_ids_text_and_prompts_as_transformers(name, tmp_path):
    folder = fetch(name)
    path = write_vocabulary(folder, tmp_path / "model.gguf", pre=PRE[name], template=TEMPLATE)
    own = GGUFTokenizer.from_directory(path)
    other = PreTrainedTokenizerFast.from_pretrained(folder)
    check_ids_and_texts(own, other, texts_for(name))
    source, config = (
        json.loads((folder / file).read_text(encoding="utf-8"))
        for file in ("tokenizer.json", "tokenizer_config.json")
    )
    bos = [other.bos_token_id] if adds_bos(source, config) else []
    assert own.encode("hi") == [*bos, *other.encode("hi", add_special_tokens=False)]
    assert own.eos_token_id == other.eos_token_id
    other.chat_template = other.chat_template or TEMPLATE
    check_prompts(own, other)


def check_ids_and_texts(own, other, texts):
    """Compare ids, decoded texts, and texts that are decoded token by token."""
    assert len(texts) >= 300
    for text in texts:
        ids = own.encode(text, add_special_tokens=False)
        assert ids == other.encode(text, add_special_tokens=False), text
        decoded = other.decode(ids, clean_up_tokenization_spaces=False)
        assert own.decode(ids) == decoded
        assert streamed(own, ids) == decoded, text


def streamed(tokenizer, ids):
    """Return the text of tokens that arrive one by one."""
    detokenizer = make_detokenizer(tokenizer, [], skip_special_tokens=False)
    assert isinstance(detokenizer, PieceDetokenizer)
    return "".join([detokenizer.push([token]) for token in ids]) + detokenizer.flush()


def check_prompts(own, other):
    now = datetime.now()
    for messages in CONVERSATIONS:
        for tools in (None, TOOLS):
            for prompt in (False, True):
                kwargs = {"tools": tools, "add_generation_prompt": prompt}
                expected = other.apply_chat_template(messages, tokenize=False, **kwargs)
                actual = own.apply_chat_template(messages, **kwargs)
                assert actual == expected or now.day != datetime.now().day
    with pytest.raises(RequestError):
        own.apply_chat_template(CONVERSATIONS[0], chat_template="{{ raise_exception('no') }}")


def test_the_derived_sentencepiece_merges_equal_the_published_merges(tmp_path):
    folder = fetch("llama2")
    path = write_vocabulary(folder, tmp_path / "model.gguf", pre=None)
    published = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    assert derive_merges(read_vocabulary(GGUFFile(path))) == merges_of(published)


@pytest.mark.costly
def test_the_tokenizer_of_smollm2_in_its_gguf_file_equals_that_of_transformers():
    (file,) = fetch("smollm2").iterdir()
    own = GGUFTokenizer.from_directory(file)
    other = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert (own.eos_token_id, own.vocab_size) == (other.eos_token_id, len(other))
    # transformers uses the pattern of GPT-2 for this vocabulary, which does not split numbers.
    texts = [text for text in all_texts() if not any(item.isnumeric() for item in text)]
    for text in texts:
        assert own.encode(text) == other.encode(text), text
    assert [own.decode([token]) for token in own.encode("x 1234")] == ["x", " ", *"1234"]
    check_prompts(own, other)


@pytest.mark.soak
def test_the_vocabulary_of_the_gguf_file_of_gemma_equals_the_published_vocabulary():
    (file,) = fetch("gemma3_270m").iterdir()
    own = GGUFTokenizer.from_directory(file)
    other = PreTrainedTokenizerFast.from_pretrained(fetch("gemma3"))
    check_ids_and_texts(own, other, [text for text in all_texts() if SPACE not in text])


@pytest.mark.costly
@pytest.mark.parametrize("name", ["llama2", pytest.param("llama3", marks=pytest.mark.soak)])
def test_a_tokenizer_of_a_gguf_file_that_is_saved_gives_the_same_ids_in_transformers(
    name, tmp_path
):
    path = write_vocabulary(fetch(name), tmp_path / "model.gguf", pre=PRE[name], template=TEMPLATE)
    own = GGUFTokenizer.from_directory(path)
    for file, content in tokenizer_files(own).items():
        (tmp_path / file).write_text(content, encoding="utf-8")
    saved = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in texts_for(name):
        assert saved.encode(text) == own.encode(text)
        assert saved.decode(own.encode(text)) == own.decode(own.encode(text))
    for messages in CONVERSATIONS:
        expected = own.apply_chat_template(messages)
        prompt = saved.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert prompt == expected
