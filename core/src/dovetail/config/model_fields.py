"""Types and ranges of the fields of config.json that engines and models read.

One table serves all architectures; it has the usual names of fields. A value of a wrong type, or
one that no model could have, is rejected before a plugin or worker reads it. null means absent.
Unknown fields are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dovetail.errors import ModelError
from dovetail.value_checks import shorten

Check = Callable[[Any], str]
"""Returns "" for an accepted value, otherwise a description of the accepted values."""

MAX_SIZE = 2**31 - 1
MAX_VOCAB_SIZE = 2**31 - 1
MAX_HEADS = 2**16
MAX_LAYERS = 2048
"""Maximum number of layers; published models have far fewer. Creating a layer takes about 1 ms."""
MAX_LENGTH = 2**31 - 1
MAX_NUMBER = 1e30
MAX_LIST = 1_000_000


def _integer(low: int, high: int) -> Check:
    expected = f"an integer from {low} to {high}"

    def check(value: Any) -> str:
        return "" if type(value) is int and low <= value <= high else expected

    return check


def _per_layer(low: int, high: int) -> Check:
    """Accept an integer or a list of integers. Some architectures have one for each layer."""
    check_integer = _integer(low, high)

    def check(value: Any) -> str:
        if isinstance(value, (list, tuple)) and 0 < len(value) <= MAX_LAYERS:
            return next(
                (
                    f"a list with {check_integer(item)} for each layer"
                    for item in value
                    if check_integer(item)
                ),
                "",
            )
        return check_integer(value)

    return check


def _number(low: float, high: float, *, open_low: bool = False) -> Check:
    expected = f"a number {'above' if open_low else 'from'} {low:g} {'and' if open_low else 'to'} "
    expected += f"at most {high:g}" if open_low else f"{high:g}"

    def check(value: Any) -> str:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # Comparisons with NaN are False.
        valid = is_number and low <= value <= high and not (open_low and value == low)
        return "" if valid else expected

    return check


def _flag(value: Any) -> str:
    return "" if isinstance(value, bool) else "true or false"


def _text(value: Any) -> str:
    valid = isinstance(value, str) and 0 < len(value) <= 200
    return "" if valid else "a string of 1 to 200 characters"


def _strings(value: Any) -> str:
    valid = isinstance(value, (list, tuple)) and len(value) <= MAX_LAYERS
    if valid and not any(_text(item) for item in value):
        return ""
    return f"a list of at most {MAX_LAYERS} strings"


def _token_ids(value: Any) -> str:
    check_integer = _integer(-1, MAX_LENGTH)
    if isinstance(value, (list, tuple)):
        valid = len(value) <= MAX_LIST and not any(check_integer(item) for item in value)
    else:
        valid = not check_integer(value)
    return "" if valid else f"a token id (at most {MAX_LENGTH}) or a list of them"


def _numbers(value: Any) -> str:
    check_number = _number(-MAX_NUMBER, MAX_NUMBER)
    valid = isinstance(value, (list, tuple)) and len(value) <= MAX_LIST
    return "" if valid and not any(check_number(item) for item in value) else "a list of numbers"


_SIZE = _per_layer(1, MAX_SIZE)
_HEADS = _per_layer(1, MAX_HEADS)
_LENGTH = _integer(1, MAX_LENGTH)
_WINDOW = _per_layer(-1, MAX_LENGTH)
_POSITIVE = _number(0, MAX_NUMBER, open_low=True)
_EPSILON = _number(0, 1)
_SHARE = _number(0, 1)

_FIELDS: Mapping[str, Check] = {
    "vocab_size": _integer(1, MAX_VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner"), _SIZE),
    **dict.fromkeys(("ffn_dim", "embedding_size"), _SIZE),
    "moe_intermediate_size": _per_layer(0, MAX_SIZE),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), _integer(1, MAX_LAYERS)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "head_dim"), _HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts"), _integer(0, MAX_HEADS)),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), _LENGTH),
    **dict.fromkeys(("seq_length", "max_sequence_length"), _LENGTH),
    "original_max_position_embeddings": _LENGTH,
    "sliding_window": _WINDOW,
    "max_window_layers": _integer(0, MAX_LENGTH),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), _EPSILON),
    "rope_theta": _POSITIVE,
    "partial_rotary_factor": _SHARE,
    "initializer_range": _number(0, MAX_NUMBER),
    "attention_dropout": _SHARE,
    "attn_logit_softcapping": _number(0, MAX_NUMBER),
    "final_logit_softcapping": _number(0, MAX_NUMBER),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache"), _flag),
    "use_sliding_window": _flag,
    **dict.fromkeys(("hidden_act", "hidden_activation", "model_type"), _text),
    **dict.fromkeys(("dtype", "torch_dtype"), _text),
    "layer_types": _strings,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _token_ids),
}

_ROPE_FIELDS: Mapping[str, Check] = {
    **dict.fromkeys(("rope_type", "type"), _text),
    **dict.fromkeys(("factor", "rope_theta", "attention_factor"), _POSITIVE),
    "original_max_position_embeddings": _LENGTH,
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), _POSITIVE),
    **dict.fromkeys(("beta_fast", "beta_slow"), _number(0, MAX_NUMBER)),
    **dict.fromkeys(("mscale", "mscale_all_dim"), _number(0, MAX_NUMBER)),
    "partial_rotary_factor": _SHARE,
    **dict.fromkeys(("short_factor", "long_factor", "mrope_section"), _numbers),
    "truncate": _flag,
}

_PARTS = ("text_config",)
_ROPE_TABLES = ("rope_scaling", "rope_parameters")


def check_model_fields(config: Mapping[str, Any]) -> None:
    """Raise ModelError for the first field of config.json that has a wrong type or range.

    config: config.json with hf_overrides applied. The message has the field, its value and the
    accepted values.
    """
    _check_table(config, _FIELDS, "")
    for name in _ROPE_TABLES:
        _check_rope(config.get(name), name)
    for name in _PARTS:
        part = config.get(name)
        if isinstance(part, Mapping):
            _check_table(part, _FIELDS, f"{name}.")
            for table in _ROPE_TABLES:
                _check_rope(part.get(table), f"{name}.{table}")


def check_token_ids(name: str, file: str, value: Any) -> None:
    """Raise ModelError unless `value` is a token id, from 0 to MAX_LENGTH, or a list of them."""
    for token in value if isinstance(value, (list, tuple)) else (value,):
        if type(token) is not int or not 0 <= token <= MAX_LENGTH:
            raise ModelError(
                f"{name}={shorten(value)} of {file} must be a token id from 0 to {MAX_LENGTH} or a "
                "list of them; correct the file, or use hf_overrides or override_generation_config."
            )


def _check_rope(table: Any, name: str) -> None:
    if table is None:
        return
    if not isinstance(table, Mapping):
        raise _wrong(name, table, "a table")
    for key, inner in table.items():
        if isinstance(inner, Mapping):  # one table for each kind of layer
            _check_table(inner, _ROPE_FIELDS, f"{name}.{key}.")
    _check_table(table, _ROPE_FIELDS, f"{name}.")


def _check_table(table: Mapping[str, Any], checks: Mapping[str, Check], prefix: str) -> None:
    for name, check in checks.items():
        value = table.get(name)
        if value is None:
            continue
        if expected := check(value):
            raise _wrong(prefix + name, value, expected)


def _wrong(name: str, value: Any, expected: str) -> ModelError:
    return ModelError(
        f"config.json: {name} is {shorten(value)}, but it must be {expected}; correct the file or "
        "use hf_overrides."
    )
