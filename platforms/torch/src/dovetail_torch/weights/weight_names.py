"""The names of weights in a checkpoint and in the model.

They are equal except for declared `weight_mappings` (`WeightMapping`). This module does not depend
on tensors or files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dovetail.errors import ModelError
from dovetail.interfaces.model import WeightMapping

_ANY = "{}"


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """A compiled mapping. source: pattern of a name, or of its start up to a dot."""

    mapping: WeightMapping
    source: re.Pattern[str]


@dataclass(frozen=True, kw_only=True)
class StoredLayout:
    """The layout of a weight in the checkpoint. See `WeightMapping` for the fields."""

    transposed: bool = False
    groups: int = 1
    rotary_pairs: tuple[int, int] = (0, 0)
    rotary_last: bool = False
    stacked: int = 0

    @classmethod
    def of(cls, mapping: WeightMapping, name: str) -> StoredLayout:
        """Return the layout of the weight `name`. Only matrices are stored transposed."""
        return cls(
            transposed=mapping.transposed and (mapping.stacked > 0 or name.endswith(".weight")),
            groups=mapping.groups,
            rotary_pairs=mapping.rotary_pairs,
            rotary_last=mapping.rotary_last,
            stacked=mapping.stacked,
        )


PLAIN = StoredLayout()
"""The layout of the model: [out, in], one group, rotary features in halves."""


class WeightNames:
    """The names of one model's weights. The first mapping whose source matches a name applies."""

    def __init__(self, mappings: Sequence[WeightMapping] = (), *, owner: str = "the model") -> None:
        """Compile `mappings`. Raise ModelError, naming `owner`, for an invalid one."""
        self._rules = tuple(_compile(mapping, owner) for mapping in mappings)
        self._targets = _TargetIndex(mappings)

    @classmethod
    def of(cls, model: object) -> WeightNames:
        """Return the names of a model, according to its `weight_mappings`."""
        return cls(getattr(model, "weight_mappings", ()), owner=type(model).__name__)

    def to_model(self, name: str) -> tuple[tuple[str, ...], StoredLayout]:
        """Return the model's names of a checkpoint weight, and its layout in the checkpoint.

        With several names, the weight contains their concatenated output features. Without names,
        the model does not use the weight.
        """
        for rule in self._rules:
            if match := rule.source.fullmatch(name):
                *numbers, rest = match.groups()
                targets = (target.format(*numbers) + rest for target in rule.mapping.targets)
                return tuple(targets), StoredLayout.of(rule.mapping, name)
        return (name,), PLAIN

    def to_checkpoint(self, name: str) -> str:
        """Return the name in the checkpoint of a weight of the model."""
        for mapping, target in self._targets.find(name):
            if match := _pattern(target).fullmatch(name):
                *numbers, rest = match.groups()
                return mapping.source.format(*numbers) + rest
        return name


class _TargetIndex:
    """Finds the targets that may match a name: a layer with experts has thousands of targets.

    The key of a target: the number of its parts between dots, the positions of parts with `{}`, and
    the other parts.
    """

    def __init__(self, mappings: Sequence[WeightMapping]) -> None:
        self._forms: set[_Form] = set()
        self._found: dict[tuple[_Form, tuple[str, ...]], list[_Target]] = {}
        pairs = ((mapping, target) for mapping in mappings for target in mapping.targets)
        for order, (owner, target) in enumerate(pairs):
            parts = target.split(".")
            form = (len(parts), tuple(i for i, part in enumerate(parts) if _ANY in part))
            self._forms.add(form)
            self._found.setdefault(_key(form, parts), []).append((order, owner, target))

    def find(self, name: str) -> Iterator[tuple[WeightMapping, str]]:
        """Yield the mappings and targets that may match, in the order of the mappings."""
        parts = name.split(".")
        matches = [item for form in self._forms for item in self._found.get(_key(form, parts), ())]
        for _, mapping, target in sorted(matches, key=lambda item: item[0]):
            yield mapping, target


_Form = tuple[int, tuple[int, ...]]
_Target = tuple[int, WeightMapping, str]


def _key(form: _Form, parts: Sequence[str]) -> tuple[_Form, tuple[str, ...]]:
    length, wild = form
    return form, tuple(part for i, part in enumerate(parts[:length]) if i not in wild)


def _compile(mapping: WeightMapping, owner: str) -> _Rule:
    if not isinstance(mapping, WeightMapping):
        raise ModelError(
            f"weight_mappings of {owner}: expected WeightMapping objects, got {mapping!r}."
        )
    num_open = mapping.source.count(_ANY)
    for target in mapping.targets:
        if target.count(_ANY) != num_open:
            raise ModelError(
                f"weight_mappings of {owner}: {target!r} and the source {mapping.source!r} must "
                f"contain the same number of {_ANY}."
            )
    return _Rule(mapping=mapping, source=_pattern(mapping.source))


def _pattern(name: str) -> re.Pattern[str]:
    """Return the pattern: a group for each `{}`, and a group for a dot and the end of the name."""
    parts = map(re.escape, name.split(_ANY))
    return re.compile(r"([^.]+)".join(parts) + r"((?:\..+)?)")
