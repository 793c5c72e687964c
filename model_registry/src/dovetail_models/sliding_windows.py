"""Which layers of a model see all tokens and which only a window, as config.json says it."""

from __future__ import annotations

from typing import Any

from dovetail.errors import ModelError
from dovetail_models.config_reader import Config, read_count, read_flag, read_num_layers

DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28


def read_mistral_windows(config: Config) -> tuple[int, ...]:
    """Return the window of each layer, 0 for none: one for all; null is none."""
    num_layers = read_num_layers(config)
    if config.get("sliding_window", DEFAULT_WINDOW) is None:
        return (0,) * num_layers
    return (read_count(config, "sliding_window", DEFAULT_WINDOW),) * num_layers


def read_qwen_windows(config: Config) -> tuple[int, ...]:
    """Return the window of each layer, 0 for none.

    Without `use_sliding_window` there is none. With it, `layer_types` says which layers have one;
    where it is absent, those from `max_window_layers` on. Raises ModelError for other layer types.
    """
    num_layers = read_num_layers(config)
    kinds = config.get("layer_types")
    if kinds is None:
        first = read_count(config, "max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, minimum=0)
        has_window = [index >= first for index in range(num_layers)]
    else:
        _check_layer_types(kinds, num_layers)
        has_window = [kind == "sliding_attention" for kind in kinds]
    if not read_flag(config, "use_sliding_window"):
        return (0,) * num_layers
    # null beside use_sliding_window is a window of no size, which means none.
    if config.get("sliding_window", DEFAULT_WINDOW) is None:
        return (0,) * num_layers
    window = read_count(config, "sliding_window", DEFAULT_WINDOW)
    return tuple(window if windowed else 0 for windowed in has_window)


def _check_layer_types(kinds: Any, num_layers: int) -> None:
    known = ("full_attention", "sliding_attention")
    is_list = isinstance(kinds, list | tuple)
    if not is_list or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise ModelError(
            f"config.json: layer_types is {kinds!r}, it must give {num_layers} layers, each "
            "full_attention or sliding_attention"
        )
