"""Reads the sliding window of each layer from config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.errors import ModelError
from dovetail.value_checks import shorten
from dovetail_models.config_reader import Config, read_count, read_flag, read_num_layers

DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28


def read_mistral_windows(config: Config) -> tuple[int, ...]:
    """Return the same window for all layers, or 0 if `sliding_window` is null."""
    num_layers = read_num_layers(config)
    if config.get("sliding_window", DEFAULT_WINDOW) is None:
        return (0,) * num_layers
    return (read_count(config, "sliding_window", DEFAULT_WINDOW),) * num_layers


def read_qwen_windows(config: Config) -> tuple[int, ...]:
    """Return the window of each layer, or 0 for a layer without a window.

    Without `use_sliding_window`, no layer has a window. With it, each layer with the type
    sliding_attention in `layer_types` has a window; if `layer_types` is absent, all layers from
    `max_window_layers` on have a window. Raises ModelError for unknown layer types.
    """
    num_layers = read_num_layers(config)
    kinds = config.get("layer_types")
    if kinds is None:
        first = read_count(config, "max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, minimum=0)
        has_window = [index >= first for index in range(num_layers)]
    else:
        check_layer_types(kinds, num_layers)
        has_window = [kind == "sliding_attention" for kind in kinds]
    if not read_flag(config, "use_sliding_window"):
        return (0,) * num_layers
    # With use_sliding_window, a null sliding_window means that no layer has a window.
    if config.get("sliding_window", DEFAULT_WINDOW) is None:
        return (0,) * num_layers
    window = read_count(config, "sliding_window", DEFAULT_WINDOW)
    return tuple(window if windowed else 0 for windowed in has_window)


def read_layer_types(config: Config, *, pattern: int) -> tuple[str, ...]:
    """Return the type of each layer: full_attention or sliding_attention.

    pattern: without `layer_types`, every layer whose number (counted from 1) is a multiple of it
    has full attention. The field `sliding_window_pattern` takes precedence.
    """
    num_layers = read_num_layers(config)
    kinds = config.get("layer_types")
    if kinds is not None:
        check_layer_types(kinds, num_layers)
        return tuple(kinds)
    pattern = read_count(config, "sliding_window_pattern", pattern)
    numbers = range(1, num_layers + 1)
    return tuple("sliding_attention" if n % pattern else "full_attention" for n in numbers)


def read_windows_of(config: Config, kinds: Sequence[str]) -> tuple[int, ...]:
    """Return the window of each layer by its type. A null `sliding_window` means no window."""
    if config.get("sliding_window", DEFAULT_WINDOW) is None:
        return (0,) * len(kinds)
    window = read_count(config, "sliding_window", DEFAULT_WINDOW)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def check_layer_types(kinds: Any, num_layers: int, local: str = "sliding_attention") -> None:
    """Raise ModelError unless `kinds` is a list of full_attention and `local`, one per layer."""
    known = ("full_attention", local)
    is_list = isinstance(kinds, list | tuple)
    if not is_list or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise ModelError(
            f"config.json: layer_types is {shorten(kinds)}; it must be a list of {num_layers} "
            f"values, each full_attention or {local}"
        )
