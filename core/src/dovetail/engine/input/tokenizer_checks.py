"""Loads the tokenizer of an engine and checks it against the model's vocabulary.

Tokenizing a text must not produce a token id without an embedding.
"""

from __future__ import annotations

import logging

from dovetail.config import EngineConfig, RequestedConfig
from dovetail.config.resolve import DEFAULT_TOKENIZER
from dovetail.errors import ModelError
from dovetail.interfaces.config_fields import AUTO
from dovetail.interfaces.tokenizer import Tokenizer
from dovetail.plugins import PluginRegistry
from dovetail.value_checks import shorten

logger = logging.getLogger(__name__)


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ModelError if an ordinary token has an id of at least `vocab_size`.

    Special tokens may have such ids, because some fine-tuned models have a padding token without
    an embedding. A warning is logged, and requests that contain these tokens are rejected.
    """
    beyond = range(vocab_size, tokenizer.vocab_size)
    if not beyond:
        return
    problem = (
        f"the tokenizer has token ids up to {tokenizer.vocab_size - 1}, but the model's vocabulary "
        f"has only {vocab_size} (vocab_size in config.json)"
    )
    num_special = sum(token in beyond for token in tokenizer.special_token_ids)
    if num_special == len(beyond):
        logger.warning(
            "%s. Requests that contain a special token with an id of %d or more are rejected.",
            problem,
            vocab_size,
        )
        return
    raise ModelError(
        f"{problem}: tokenizer.json belongs to another model. Copy the tokenizer.json of this "
        "model to its directory, or set the option tokenizer to the directory that has it."
    )


def longest_token_chars(tokenizer: Tokenizer) -> int:
    """Return the length of the longest token. Decodes every id once (0.3 s for 150,000 ids)."""
    return max((len(tokenizer.decode([token])) for token in range(tokenizer.vocab_size)), default=1)


def usable_eos_token_ids(
    configured: frozenset[int], tokenizer_eos: int | None, vocab_size: int
) -> frozenset[int]:
    """Return the end-of-text ids. Ids outside of the vocabulary are ignored with a warning.

    configured: the ids in config.json or generation_config.json. tokenizer_eos: the tokenizer's id.
    """
    usable = frozenset(token for token in configured if token < vocab_size)
    if unusable := configured - usable:
        logger.warning(
            "eos_token_id %s of generation_config.json or config.json is not in the model's "
            "vocabulary (ids from 0 to %d); it is ignored. If this is a mistake, correct the file, "
            "or use override_generation_config.",
            shorten(sorted(unusable)),
            vocab_size - 1,
        )
    if tokenizer_eos is None:
        return usable
    if not 0 <= tokenizer_eos < vocab_size:
        logger.warning(
            "The tokenizer's end-of-text token %s is not in the model's vocabulary (ids from 0 to "
            "%d); it is ignored.",
            shorten(tokenizer_eos),
            vocab_size - 1,
        )
        return usable
    return usable | {tokenizer_eos}


def load_tokenizer(
    config: RequestedConfig | EngineConfig, plugins: PluginRegistry
) -> Tokenizer | None:
    """Return the tokenizer that `config` names, or None with `skip_tokenizer_init`.

    Raises PluginError if its plugin cannot be loaded, ModelError if its files cannot be used.
    """
    model = config.model
    if model.skip_tokenizer_init:
        return None
    reference = model.tokenizer_mode
    if reference == AUTO:
        reference = model.defaults.get("model.tokenizer_mode", DEFAULT_TOKENIZER)
    tokenizer_cls = plugins.load("tokenizer", reference)
    options = plugins.options_of("tokenizer", tokenizer_cls)
    kwargs = {"options": options} if options else {}
    tokenizer: Tokenizer = tokenizer_cls.from_directory(model.tokenizer_dir, **kwargs)
    return tokenizer
