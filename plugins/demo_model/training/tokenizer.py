"""The tokenizer of the demo model: byte-level BPE with single digits and a chat template.

Contract: decoding an encoded UTF-8 text returns the same text. Every digit is a separate token. The
nouns of the tasks are single tokens. Both `tokenizers` and `transformers` load the saved files.
Method: byte pair encoding, Sennrich et al. 2016, on bytes as in GPT-2.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from conversations import Conversation, all_fixed_text, draw_conversation
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from dovetail_demo_model import vocabulary
from dovetail_demo_model.tasks import TASKS

VOCAB_SIZE = 2048
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, END)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|>{{ message['content'] }}{{ eos_token }}"
    "{% else %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_ENGLISH = Path(__file__).parent / "english.txt"


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
        for pair in draw_conversation(rng, weights).turns:
            texts += pair
    # The repetitions make each word a single token.
    for word in _single_words():
        texts += [word, f" {word}"] * 60
    texts += all_fixed_text() * 10
    words = _ENGLISH.read_text(encoding="utf-8").split()
    texts += [f" {word}" for word in words for _ in range(3)]
    return texts


def train_tokenizer(seed: int) -> Tokenizer:
    """Train the tokenizer; the same seed gives the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_tokenizer_text(seed), trainer)
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
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT, END],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


class ConversationEncoder:
    """Turn conversations into token ids and a mask of the tokens to learn.

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
        ids, mask = [special[BOS]], [0]
        if conversation.system:
            head = [special[SYSTEM], *self._text(conversation.system), special[END]]
            ids += head
            mask += [0] * len(head)
        for user, assistant in conversation.turns:
            if conversation.raw:
                question, answer = self._text(user), self._text("\n" + assistant)
            else:
                question = [special[USER], *self._text(user), special[END], special[ASSISTANT]]
                answer = self._text(assistant)
            ids += [*question, *answer, special[EOS]]
            mask += [0] * len(question) + [1] * (len(answer) + 1)
        return ids, mask
