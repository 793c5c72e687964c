"""The tokens of a tokenizer in the form that xgrammar reads."""

from __future__ import annotations

from xgrammar import GrammarCompiler, TokenizerInfo, VocabType

from dovetail.errors import RequestError
from dovetail.interfaces.tokenizer import Tokenizer


class Vocabulary:
    """The tokens of a model. Raises RequestError if the text of a token depends on its neighbors.

    vocab_size: number of columns of the logits. special: the strings of special tokens. usable: for
    each token, whether a grammar may contain it as text.
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
        tokens = [item.encode() if isinstance(item, str) else bytes(item) for item in entries]
        special = [token for token in tokenizer.special_token_ids if token < count]
        self.special = [tokens[item].decode(errors="replace") for item in special if tokens[item]]
        for token in special:
            tokens[token] = b""
        self.usable = bytes(map(bool, tokens)) + bytes(vocab_size - count)
        end = tokenizer.eos_token_id
        ends = [end] if end is not None and end < vocab_size else []
        info = TokenizerInfo(tokens, VocabType.RAW, vocab_size=vocab_size, stop_token_ids=ends)
        self.compiler = GrammarCompiler(info, max_threads=1, cache_enabled=False)
