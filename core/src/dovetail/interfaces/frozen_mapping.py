"""An immutable mapping for config.json and options in a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn


class FrozenDict(dict[str, Any]):
    """A dict that raises TypeError on every change.

    It is a `dict`, so `json.dumps`, `isinstance` and `{**mapping}` work as usual. Copies and
    pickles are frozen too.
    """

    __slots__ = ()

    def _reject(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("this mapping is frozen; create a changed copy: {**mapping, key: value}")

    __setitem__ = __delitem__ = __ior__ = _reject
    clear = pop = popitem = setdefault = update = _reject

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[str, Any]]]:
        """Pickle and copy with the constructor, because setting items raises TypeError."""
        return FrozenDict, (dict(self),)


def freeze(value: Any) -> Any:
    """Return a copy of `value` with every mapping as FrozenDict and every list as tuple."""
    if isinstance(value, Mapping):
        return FrozenDict({key: freeze(inner) for key, inner in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(freeze(inner) for inner in value)
    return value
