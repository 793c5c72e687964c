"""The tokens of a tokenizer as bytes, in the form that llguidance reads."""

from __future__ import annotations

from functools import cached_property

from llguidance import LLTokenizer, TokenizerWrapper

from dovetail.errors import RequestError
from dovetail.interfaces.tokenizer import Tokenizer


class Vocabulary:
    """The tokens of a model. Raises RequestError if the text of a token depends on its neighbors.

    vocab_size: number of columns of the logits. tokens: the bytes of each token; empty for tokens
    that a grammar must never allow as text. special: ids by the text of special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        pieces = tokenizer.token_pieces(skip_special_tokens=False)
        if pieces is None:
            raise RequestError(
                "structured_outputs needs a tokenizer whose tokens have their own text, but "
                "this tokenizer has none. Omit structured_outputs.",
                parameter="structured_outputs",
            )
        self.vocab_size = vocab_size
        count = min(tokenizer.vocab_size, vocab_size)
        entries = [pieces[token] for token in range(count)]
        self.tokens = [item.encode() if isinstance(item, str) else bytes(item) for item in entries]
        special = sorted(token for token in tokenizer.special_token_ids if token < count)
        self.special = {
            self.tokens[token].decode(errors="replace"): token
            for token in special
            if self.tokens[token]
        }
        eos = tokenizer.eos_token_id
        source = _Source(tokenizer, self.tokens, special, 0 if eos is None else eos)
        self.compiled = LLTokenizer(TokenizerWrapper(source), n_vocab=vocab_size)


class _Source:
    """The tokenizer interface that llguidance reads."""

    def __init__(
        self, tokenizer: Tokenizer, tokens: list[bytes], special: list[int], eos: int
    ) -> None:
        self.eos_token_id = eos
        self.bos_token_id = None
        self.tokens = tokens
        self.special_token_ids = special
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("expected a str")
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        content = text.encode()
        if b"".join(map(self.tokens.__getitem__, token_ids)) == content:
            return token_ids
        return self._longest_tokens(content)  # the tokenizer adds a space, for example

    def _longest_tokens(self, content: bytes) -> list[int]:
        """Return tokens with exactly these bytes, each as long as possible."""
        tokens, start = [], 0
        while start < len(content):
            sizes = range(min(self._longest, len(content) - start), 0, -1)
            pieces = (content[start : start + size] for size in sizes)
            piece = next((item for item in pieces if item in self._ids), b"")
            if not piece:
                break
            tokens.append(self._ids[piece])
            start += len(piece)
        return tokens

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {token: i for i, token in enumerate(self.tokens) if token and i not in special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)
