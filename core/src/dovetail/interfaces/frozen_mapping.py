"""A mapping that stays as it was made: what config.json and options become inside a config.

Does not depend on what is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn


class FrozenDict(dict[str, Any]):
    """A dict that refuses every change with TypeError.

    Still a `dict`, so that `json.dumps`, `isinstance` and `{**mapping}` do what readers expect;
    copies and pickles are frozen too.
    """

    __slots__ = ()

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(
            "this mapping is frozen; make a changed copy of it: {**mapping, key: value}"
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[FrozenDict], tuple[dict[str, Any]]]:
        """Pickle and copy through the constructor: item by item would be refused."""
        return FrozenDict, (dict(self),)


def freeze(value: Any) -> Any:
    """Return `value` with every mapping in it as FrozenDict and every list as tuple, copied."""
    if isinstance(value, Mapping):
        return FrozenDict({key: freeze(inner) for key, inner in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(freeze(inner) for inner in value)
    return value
