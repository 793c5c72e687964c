"""The tokenizer of the demo model: byte-level BPE with single digits and a chat template.

Contract: decoding an encoded UTF-8 text returns the same text. Every digit is a separate token. The
nouns of the tasks are single tokens. Both `tokenizers` and `transformers` load the saved files.
Function calls have the Hermes format. The tags of that format are tokens, but not special tokens,
so the text of an answer contains them. The template lists functions as signatures to save tokens.
Method: byte pair encoding, Sennrich et al. 2016, on bytes as in GPT-2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from conversations import Conversation, all_fixed_text, draw_conversation
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from dovetail_demo_model import vocabulary
from dovetail_demo_model.tasks import TASKS

VOCAB_SIZE = 2048
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
TOOL = "<|tool|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, END, TOOL)
TAGS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

_TOOLS_TEMPLATE = (
    "<tools>"
    "{% for tool in tools %}"
    "{% set function = tool['function'] if 'function' in tool else tool %}"
    "{% set parameters = (function['parameters'] or {})['properties'] or {} %}"
    "{{ '\n' + function['name'] + '(' }}"
    "{% for name, schema in parameters.items() %}"
    "{{ name + ': ' + schema['type'] | default('any') | string }}{{ ', ' if not loop.last }}"
    "{% endfor %}"
    "{{ ')' }}"
    "{% endfor %}"
    "{{ '\n</tools>' }}"
)

_CALLS_TEMPLATE = (
    "{% for call in message['tool_calls'] or [] %}"
    "{% set function = call['function'] if 'function' in call else call %}"
    "{% set arguments = function['arguments'] %}"
    "{{ '\n' if message['content'] or not loop.first }}"
    "{{ '<tool_call>\n{\"name\": ' + function['name'] | tojson + ', \"arguments\": ' }}"
    "{{ arguments if arguments is string else arguments | tojson }}"
    "{{ '}\n</tool_call>' }}"
    "{% endfor %}"
)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% set first = messages[0] if messages and messages[0]['role'] == 'system' else none %}"
    "{% if tools %}"
    "<|system|>{{ first['content'] + '\n' if first and first['content'] }}"
    f"{_TOOLS_TEMPLATE}<|end|>"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    f"<|assistant|>{{{{ message['content'] or '' }}}}{_CALLS_TEMPLATE}{{{{ eos_token }}}}"
    "{% elif message['role'] == 'tool' %}"
    "<|tool|><tool_response>{{ '\n' ~ message['content'] ~ '\n' }}</tool_response><|end|>"
    "{% elif not (tools and loop.first and first) %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_ENGLISH = Path(__file__).parent / "english.txt"
_TAG = re.compile("|".join(TAGS))


def _single_words() -> tuple[str, ...]:
    """List the words that must be one token, with and without a leading space."""
    v = vocabulary
    places = v.NOUNS + v.NAMES + v.CITIES + v.COLORS
    return places + v.WEEKDAYS + v.MONTHS + v.ONES + v.TENS


def _tokenizer_text(seed: int) -> list[str]:
    """List the texts from which the merges are learned, in a fixed order."""
    rng = Random(f"tokenizer:{seed}")
    weights = dict.fromkeys(TASKS, 1.0)
    texts = []
    for _ in range(6000):
        conversation = draw_conversation(rng, weights)
        texts += [part for text in _texts(conversation) for part in _TAG.split(text)]
    # The repetitions make each word a single token.
    for word in _single_words():
        texts += [word, f" {word}"] * 60
    texts += all_fixed_text() * 10
    words = _ENGLISH.read_text(encoding="utf-8").split()
    texts += [f" {word}" for word in words for _ in range(3)]
    return texts


def system_text(conversation: Conversation) -> str:
    """Return the text between <|system|> and <|end|>, or "" for none."""
    if not conversation.tools:
        return conversation.system
    head = conversation.system + "\n" if conversation.system else ""
    lines = [_signature(tool["function"]) for tool in conversation.tools]
    return head + "\n".join(["<tools>", *lines, "</tools>"])


def _signature(function: Mapping[str, Any]) -> str:
    schemas = function["parameters"]["properties"]
    parameters = ", ".join(f"{name}: {schema['type']}" for name, schema in schemas.items())
    return f"{function['name']}({parameters})"


def _texts(conversation: Conversation) -> list[str]:
    return [system_text(conversation), *(text for turn in conversation.turns for text in turn)]


def train_tokenizer(seed: int) -> Tokenizer:
    """Train the tokenizer. The same seed gives the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(TAGS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_tokenizer_text(seed), trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) into `folder`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT, END, TOOL],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


class ConversationEncoder:
    """Converts conversations to token ids, and a mask of the tokens that contribute to the loss.

    The ids are those of the rendered chat template. The mask is 1 for the assistant's answers,
    including the end token, and 0 elsewhere.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}

    def _text(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        """Return (ids, mask), two lists of the same length."""
        special = self._ids
        parts = [([special[BOS]], 0)]
        if system := system_text(conversation):
            parts.append(([special[SYSTEM], *self._text(system), special[END]], 0))
        for turn in conversation.turns:
            parts += self._raw_turn(turn) if conversation.raw else self._turn(turn)
        ids = [token for part, _ in parts for token in part]
        mask = [learned for part, learned in parts for _ in part]
        return ids, mask

    def _raw_turn(self, turn: Sequence[str]) -> list[tuple[list[int], int]]:
        user, assistant = turn
        return [(self._text(user), 0), ([*self._text("\n" + assistant), self._ids[EOS]], 1)]

    def _turn(self, turn: Sequence[str]) -> list[tuple[list[int], int]]:
        special = self._ids
        user, *rest = turn
        parts = [([special[USER], *self._text(user), special[END]], 0)]
        for index, text in enumerate(rest):
            if index % 2 == 0:
                parts += [([special[ASSISTANT]], 0), ([*self._text(text), special[EOS]], 1)]
            else:
                response = f"<tool_response>\n{text}\n</tool_response>"
                parts.append(([special[TOOL], *self._text(response), special[END]], 0))
        return parts
