"""Real tokenizers and chat templates: the format is recognized, and forced tool calls are valid.

The tokenizers have 128k to 201k tokens; markers of tool calls are single tokens in some of them.
"""

from __future__ import annotations

import json
from random import Random

import jsonschema
import numpy as np
import pytest
from assets import fetch

from dovetail import SamplingParams
from dovetail.config import EngineArgs
from dovetail.engine.messages.history import call_form, prepare_history
from dovetail.engine.messages.parsers import MessageParsers, parse_message
from dovetail.engine.messages.tool_use import constrain, read_tools
from dovetail.engine.plugin_choices import make_registry
from dovetail.interfaces import GrammarContext, GrammarSpec
from dovetail.tokenizers.huggingface import HuggingFaceTokenizer
from dovetail_devkit.contexts import write_fake_config
from dovetail_gguf.tokenizer import GGUFTokenizer
from dovetail_structured_output.backend import LLGuidance

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Zürich", 'a "b"']},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Weather.", "parameters": SCHEMA},
    }
]
PARSERS = {
    "qwen3": ("hermes", "think"),
    "deepseek_v3": ("deepseek_v3", ""),
    "llama3_1": ("llama3_json", ""),
    "gptoss": ("harmony", ""),
}
WITHOUT_TOOLS = ("llama3_1", "gptoss")
"""Packages without a chat template for tools: an option names the parser."""
WITH_TOOLS = sorted(PARSERS.keys() - set(WITHOUT_TOOLS))
ARGUMENTS = '{"city": "Paris", "days": 3}'
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": ARGUMENTS},
}
HISTORY = [
    {"role": "user", "content": "How is the weather in Paris?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "sunny"},
]
NUM_WALKS = 3
MAX_STEPS = 120


@pytest.fixture(scope="module", params=PARSERS)
def model(request, tmp_path_factory):
    """Return the name, the tokenizer and the parsers of a model."""
    tokenizer = HuggingFaceTokenizer.from_directory(fetch(request.param))
    folder = write_fake_config(tmp_path_factory.mktemp("model"))
    named = PARSERS[request.param][0] if request.param in WITHOUT_TOOLS else None
    args = EngineArgs.from_kwargs(model=folder, tool_parser=named)
    config = args.create_engine_config()
    return request.param, tokenizer, MessageParsers.of(config, make_registry(config), tokenizer)


@pytest.fixture(scope="module")
def backend(model):
    _, tokenizer, _ = model
    return LLGuidance(GrammarContext(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size))


@pytest.mark.costly
@pytest.mark.sampled(8)
def test_the_option_or_the_chat_template_chooses_the_parsers(model):
    name, _, parsers = model
    chosen = [item.name if item is not None else "" for item in (parsers.tools, parsers.reasoning)]
    assert tuple(chosen) == PARSERS[name]


@pytest.mark.costly
@pytest.mark.parametrize("model", WITH_TOOLS, indirect=True)
def test_the_template_renders_tools_calls_and_results(model):
    _, tokenizer, _ = model
    for content in ("", None):  # templates accept only one of them
        messages = [HISTORY[0], {**HISTORY[1], "content": content}, HISTORY[2]]
        history = prepare_history(messages, call_form(tokenizer, None))
        text = tokenizer.apply_chat_template(history, tools=TOOLS)
        assert "get_weather" in text and ARGUMENTS in text and "sunny" in text


def spec_of(tokenizer, parsers):
    """Return the grammar of a required call."""
    params = constrain(
        SamplingParams(),
        read_tools(TOOLS, "required", False),
        parser_cls=parsers.tool_parser_cls,
        markers=None,
        has_grammar=True,
    )
    grammar = params.structured_outputs
    assert grammar is not None and tokenizer.eos_token_id is not None
    ends = frozenset({tokenizer.eos_token_id})
    return GrammarSpec(form=grammar.form, text=grammar.text, stop_token_ids=ends)


@pytest.mark.costly
def test_the_grammar_accepts_the_tokens_of_a_valid_call(model, backend):
    _, tokenizer, parsers = model
    matcher = backend.compile(spec_of(tokenizer, parsers))
    text = parsers.tool_parser_cls.call_text("get_weather")
    call = text.begin + ARGUMENTS + text.end
    tokens = [*tokenizer.encode(call, add_special_tokens=False), tokenizer.eos_token_id]
    assert matcher.accept(tokens) == len(tokens)
    broken = tokenizer.encode(call.replace("Paris", "Berlin"), add_special_tokens=False)
    other = backend.compile(spec_of(tokenizer, parsers))
    assert other.accept(broken) < len(broken)


@pytest.mark.costly
def test_random_allowed_tokens_give_a_valid_call(model, backend):
    _, tokenizer, parsers = model
    width = tokenizer.vocab_size
    words = bytearray(4 * ((width + 31) // 32))
    num_ended = 0
    for seed in range(NUM_WALKS):
        matcher, random = backend.compile(spec_of(tokenizer, parsers)), Random(seed)
        tokens: list[int] = []
        while len(tokens) < MAX_STEPS:
            words[:] = bytes(len(words))
            matcher.fill_bitmask(memoryview(words))
            bits = np.unpackbits(np.frombuffer(words, np.uint8), bitorder="little")
            token = random.choice(np.flatnonzero(bits).tolist())
            assert matcher.accept([token]) == 1
            if token == tokenizer.eos_token_id:
                num_ended += 1
                break
            tokens.append(token)
        else:
            continue
        parser = parsers.make(TOOLS, "</think>")
        message = parse_message(parser, tokenizer.decode(tokens), parsers.tool_parser_cls)
        (call,) = message.tool_calls
        assert call.name == "get_weather"
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
    assert num_ended


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ["llama2", "gemma3", "smollm2"])
def test_a_schema_with_strings_is_compiled_for_other_vocabularies(name):
    """SentencePiece vocabularies have two tokens for some characters and add spaces."""
    folder = fetch(name)
    tokenizer = _tokenizer_of(folder)
    backend = LLGuidance(GrammarContext(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size))
    assert tokenizer.eos_token_id is not None
    spec = GrammarSpec(
        form="json_schema",
        text=json.dumps({"type": "string", "minLength": 3}),
        stop_token_ids=frozenset({tokenizer.eos_token_id}),
    )
    pieces = tokenizer.token_pieces(skip_special_tokens=False)
    for text, is_valid in (('"Zürich"', True), ('"Zü"', False), ("Zürich", False)):
        matcher = backend.compile(spec)
        tokens = _tokens_of(text, pieces, tokenizer.vocab_size)
        accepted = matcher.accept([*tokens, tokenizer.eos_token_id]) == len(tokens) + 1
        assert accepted == is_valid, text


def _tokenizer_of(folder):
    if (folder / "tokenizer.json").is_file():
        return HuggingFaceTokenizer.from_directory(folder)
    (file,) = folder.glob("*.gguf")
    return GGUFTokenizer.from_directory(file)


def _tokens_of(text, pieces, size):
    """Return the tokens of the characters of a text, without spaces that a tokenizer adds."""
    ids = {}
    for token in range(size):
        piece = pieces[token]
        ids.setdefault(piece.encode() if isinstance(piece, str) else bytes(piece), token)
    collected = []
    for char in text:
        whole = char.encode()
        parts = [whole] if whole in ids else [bytes([item]) for item in whole]
        collected += [ids[part] for part in parts]
    return collected
