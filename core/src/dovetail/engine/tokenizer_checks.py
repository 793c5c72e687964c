"""Whether a tokenizer and a model belong together: no text may become an id that has no embedding.

Pure; knows no files but the names by which users know them.
"""

from __future__ import annotations

import logging

from dovetail.errors import ModelError
from dovetail.interfaces.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ModelError where ordinary tokens lie beyond the model's `vocab_size` ids.

    Special tokens may: fine-tuned models are found whose padding token was never given a row. They
    are told in a warning, and a request that brings one is refused.
    """
    beyond = range(vocab_size, tokenizer.vocab_size)
    if not beyond:
        return
    found = (
        f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model's vocabulary "
        f"(vocab_size in config.json) has {vocab_size}"
    )
    if set(beyond) <= tokenizer.special_token_ids:
        logger.warning("%s; requests that bring one of those special tokens are refused.", found)
        return
    raise ModelError(
        f"{found}: tokenizer.json and weights do not belong together. Copy the tokenizer that "
        "came with the weights, or name its directory with tokenizer."
    )
