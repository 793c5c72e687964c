"""Writes prompts of a given length in tokens, without the tokenizer of the server.

A prompt is a sequence of common words. Two requests before the test measure the number of
tokens that the server counts for a word and for the chat template.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

from dovetail_client_tools.load.load_request import LoadRequest

_TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or
had an they which one you were all her she there would their we him been has when who will no
more if out so up said what its about than into them can only other time new some could these
two may first then do any like my now over such our man me even most made after also well did
many before must years where much your way down should because long each just state those
people too how little good world make very year still see own work men day get here old life
both between being under three never know same last another while us off might great go come
since against came right used take house use place set four small end put home read hand large
city night number part group line side high book water word point table room
"""
_WORDS = _TEXT.split()
_MAX_CACHED_BLOCKS = 256


@dataclass(frozen=True, kw_only=True)
class TokenScale:
    """How the server counts tokens. words_per_token: the mean for common words.

    overhead: tokens of a template.
    """

    words_per_token: float = 1.0
    overhead: int = 0

    def num_words(self, num_tokens: int) -> int:
        """Return the number of words that have this number of tokens; at least 1."""
        return max(1, round(num_tokens * self.words_per_token))


def measured_scale(counts: Mapping[int, int]) -> TokenScale:
    """Return the scale. counts: maps the number of words of two prompts to their number of tokens.

    If the counts are unusable, each word counts as one token.
    """
    (few, few_tokens), (many, many_tokens) = sorted(counts.items())
    if many_tokens <= few_tokens or few_tokens <= 0:
        return TokenScale()
    words_per_token = (many - few) / (many_tokens - few_tokens)
    overhead = max(0, round(few_tokens - few / words_per_token))
    return TokenScale(words_per_token=words_per_token, overhead=overhead)


class PromptWriter:
    """Writes the prompts of one run. seed: different seeds have no prompt in common."""

    def __init__(self, scale: TokenScale, seed: str) -> None:
        self._scale = scale
        self._seed = seed
        self._blocks: OrderedDict[int, str] = OrderedDict()

    def first(self, request: LoadRequest) -> str:
        """Return the prompt of a request without a parent."""
        num_tokens = request.num_prompt_tokens - self._scale.overhead
        parts = []
        for identity in request.prefix:
            if num_tokens <= request.block_tokens:
                break
            parts.append(self._block(identity, request.block_tokens))
            num_tokens -= request.block_tokens
        parts.append(self.words(f"request {request.number}", num_tokens))
        return " ".join(parts)

    def words(self, key: str, num_tokens: int) -> str:
        """Return words that are determined by the seed and `key`."""
        rng = Random(f"{self._seed} {key}")
        return " ".join(rng.choices(_WORDS, k=self._scale.num_words(num_tokens)))

    def _block(self, identity: int, num_tokens: int) -> str:
        text = self._blocks.get(identity)
        if text is None:
            text = self._blocks[identity] = self.words(f"block {identity}", num_tokens)
            if len(self._blocks) > _MAX_CACHED_BLOCKS:
                self._blocks.popitem(last=False)
        return text


@dataclass(slots=True)
class _Conversation:
    """The messages or the text so far, with the number of tokens."""

    turns: list[dict[str, str]] | str
    num_tokens: int
    num_children: int


class BodyWriter:
    """Writes the bodies of requests, and keeps conversations until their last request is sent.

    fields: the fields that all bodies have. is_chat: whether bodies have messages.
    """

    def __init__(
        self,
        requests: list[LoadRequest],
        writer: PromptWriter,
        *,
        fields: Mapping[str, Any],
        is_chat: bool,
    ) -> None:
        self._writer = writer
        self._fields = dict(fields)
        self._is_chat = is_chat
        self._num_children = [0] * len(requests)
        for request in requests:
            if request.parent >= 0:
                self._num_children[request.parent] += 1
        self._conversations: dict[int, _Conversation] = {}

    def has_children(self, number: int) -> bool:
        """Return whether requests continue the conversation of this request."""
        return self._num_children[number] > 0

    def body(self, request: LoadRequest) -> bytes:
        """Return the body of a request, whose parent is finished."""
        turns = self._turns(request)
        if self.has_children(request.number):
            self._conversations[request.number] = _Conversation(
                turns, request.num_prompt_tokens, self._num_children[request.number]
            )
        name = "messages" if self._is_chat else "prompt"
        body = {**self._fields, "max_tokens": request.num_output_tokens, name: turns}
        if request.priority:
            body["priority"] = request.priority
        return msgspec.json.encode(body)

    def add_output(self, number: int, text: str, num_tokens: int) -> None:
        """Store the output of a request whose conversation continues."""
        conversation = self._conversations.get(number)
        if conversation is None:
            return
        turns = conversation.turns
        if isinstance(turns, str):
            conversation.turns = turns + text
        else:
            conversation.turns = [*turns, {"role": "assistant", "content": text}]
        conversation.num_tokens += num_tokens

    def drop(self, number: int) -> None:
        """Forget the conversation of a failed request."""
        self._conversations.pop(number, None)

    def _turns(self, request: LoadRequest) -> list[dict[str, str]] | str:
        parent = self._parent(request.parent)
        if parent is None:
            text = self._writer.first(request)
            return [{"role": "user", "content": text}] if self._is_chat else text
        num_new = max(1, request.num_prompt_tokens - parent.num_tokens)
        text = self._writer.words(f"request {request.number}", num_new)
        if isinstance(parent.turns, str):
            return f"{parent.turns} {text}"
        return [*parent.turns, {"role": "user", "content": text}]

    def _parent(self, number: int) -> _Conversation | None:
        conversation = self._conversations.get(number)
        if conversation is not None:
            conversation.num_children -= 1
            if not conversation.num_children:
                del self._conversations[number]
        return conversation
