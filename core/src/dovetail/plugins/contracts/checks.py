"""Checks that a class meets the contract of its kind, before it is constructed.

The checks are structural: members, signatures and declared versions. A class need not subclass the
interface, which only provides defaults. The contract suites in `dovetail_devkit` check the behavior
of methods.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any, Generic, Protocol

from dovetail.errors import ContractError
from dovetail.plugin_kinds import get_kind
from dovetail.plugins.contracts.api_range import Version, parse_version
from dovetail.plugins.contracts.declared import field_problems
from dovetail.plugins.contracts.signatures import find_mismatches
from dovetail.value_checks import shorten

_DECLARATIONS = ("CONTRACT", "CONTRACT_VERSION")
_ABSENT = object()
_PLAIN_BASES: tuple[object, ...] = (object, Protocol, Generic)


class OtherContractError(ContractError):
    """Raised for a class that declares the contract of another plugin kind."""


def has_plain_identity(cls: type) -> bool:
    """Return whether a class compares by identity, so that it can be a key of a dict."""
    meta = type(cls)
    return meta.__eq__ is type.__eq__ and meta.__hash__ is type.__hash__


def check_contract(kind: str, cls: object) -> tuple[str, ...]:
    """Raise ContractError with all violations of the contract of `kind` by `cls`.

    Returns notes: sentences about assumptions that were made.
    """
    interface = load_interface(get_kind(kind).contract)
    if not isinstance(cls, type):
        raise ContractError(
            f"A {kind} must be a class that implements {interface.__name__}; "
            f"{_describe(cls)} is {_article(type(cls).__name__)}. Specify a class."
        )
    declared: object = getattr(cls, "CONTRACT", None)
    if declared is not None and declared != kind:
        raise OtherContractError(
            f"{_describe(cls)} does not meet the contract of {_article(kind)}: 1 problem.\n"
            f"  - it declares CONTRACT = {shorten(declared)}, but is used as {_article(kind)}"
        )
    problems = [
        *_declaration_problems(interface, cls),
        *member_problems(interface, cls),
        *field_problems(kind, cls),
    ]
    if problems:
        many = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise ContractError(
            f"{_describe(cls)} does not meet the contract of a {kind} ({interface.__name__} "
            f"{interface.CONTRACT_VERSION}): {many}.{listed}"
        )
    if getattr(cls, "CONTRACT_VERSION", None) is None:
        version = interface.CONTRACT_VERSION
        return (f"{_describe(cls)} declares no CONTRACT_VERSION; the core assumes {version}.",)
    return ()


def load_interface(target: str) -> Any:
    """Return the class that "module:Class" names in `dovetail.interfaces`."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def contract_version(kind: str) -> str:
    """Return the contract version of a kind in this core, such as "0.1"."""
    version: str = load_interface(get_kind(kind).contract).CONTRACT_VERSION
    return version


def _declaration_problems(interface: Any, cls: type) -> Iterator[str]:
    """Yield problems with the contract version and the metaclass that a class declares."""
    if not has_plain_identity(cls):
        yield "its metaclass defines __eq__ or __hash__, but classes must be compared by identity"
    version = getattr(cls, "CONTRACT_VERSION", None)
    if version is None:
        return
    required = parse_version(version)
    current = parse_version(interface.CONTRACT_VERSION)
    if required is None:
        like = f"write a string such as {interface.CONTRACT_VERSION!r}"
        yield f"CONTRACT_VERSION is {shorten(version)}; {like}"
    elif current is not None and not is_compatible(required, current):
        age = "newer" if required > current else "older"
        yield (
            f"it requires contract version {version}, which is {age} than this core's "
            f"{interface.CONTRACT_VERSION} and not compatible with this core"
        )


def is_compatible(required: Version, current: Version) -> bool:
    """Return whether a core with contract version `current` accepts a class for version `required`.

    For 0.x only the same version is compatible. From 1.0 on, minor versions only add members.
    """
    if current[0] == 0:
        return required == current
    return required[0] == current[0] and required[1] <= current[1]


def member_problems(interface: Any, cls: type) -> Iterator[str]:
    """Yield problems: members of the contract that a class lacks or defines incompatibly."""
    members = dict(_members(interface))
    abstract = set(getattr(cls, "__abstractmethods__", ()))
    for name, expected in members.items():
        actual = inspect.getattr_static(cls, name, _ABSENT)
        # Methods of a Protocol have empty bodies, so inheriting one does not implement it.
        is_empty = name in abstract or (actual is expected and Protocol in interface.__bases__)
        if expected is None:
            if actual is _ABSENT:
                yield f"attribute {name} is missing"
        elif actual is _ABSENT and _may_be_absent(name, expected, cls):
            continue
        elif actual is _ABSENT or is_empty:
            yield f"{_what(expected)} {name}{_shown(expected)} is missing"
        else:
            yield from (f"{name}: {text}" for text in _misfits(name, expected, actual, cls))
    for name in sorted(abstract - members.keys()):
        yield f"{name} is abstract, so the class cannot be instantiated"


def _is_protocols_own(definition: object) -> bool:
    """Return whether `typing` has added this constructor to a Protocol that defines none."""
    return getattr(definition, "__module__", "") == "typing"


def _members(interface: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and definition of each member. The definition of an attribute is None."""
    names = set(_DECLARATIONS)
    for base in inspect.getmro(interface):
        if base in _PLAIN_BASES:
            continue
        annotations = inspect.get_annotations(base)
        attributes = [name for name, hint in annotations.items() if "ClassVar" in str(hint)]
        for name in [*attributes, *vars(base)]:
            is_public = not name.startswith("_") or name == "__init__"
            definition = vars(base).get(name)
            if name in names or not is_public or _is_protocols_own(definition):
                continue
            names.add(name)
            if _is_method(definition) or isinstance(definition, property):
                yield name, definition
            elif name in attributes:
                yield name, None


def _misfits(name: str, expected: Any, actual: Any, cls: type) -> Iterator[str]:
    """Yield the differences that prevent callers from using `actual` in place of `expected`."""
    if actual is expected:
        return
    if isinstance(expected, property):
        if _is_method(actual):
            yield "the class has a method, but the contract has a property"
        return
    if name == "__init__" and actual is object.__init__:
        # A class without __init__ takes no arguments, but object.__init__ has (*args, **kwargs).
        parameters = list(inspect.signature(expected).parameters)[1:]
        if parameters and inspect.getattr_static(cls, "__new__") is object.__new__:
            yield f"the method does not take {parameters[0]!r}"
        return
    is_descriptor = hasattr(type(actual), "__get__") and not isinstance(actual, property)
    if not callable(actual) and not is_descriptor:
        yield f"the class has {_article(type(actual).__name__)}, but the contract has a method"
        return
    on_class = isinstance(expected, (classmethod, staticmethod))
    if on_class and inspect.isfunction(actual):
        yield f"the method must be a {type(expected).__name__}: it is called on the class"
        return
    declared, body = _function(expected), _function(actual)
    if inspect.iscoroutinefunction(body) and not inspect.iscoroutinefunction(declared):
        yield "the method is async, but the contract's method is not"
    is_bound = isinstance(actual, classmethod) or inspect.isfunction(actual)
    yield from find_mismatches(
        declared, body, skip_expected=not isinstance(expected, staticmethod), skip_actual=is_bound
    )


def _is_method(member: object) -> bool:
    return inspect.isfunction(member) or isinstance(member, (classmethod, staticmethod))


def _may_be_absent(name: str, expected: Any, cls: type) -> bool:
    is_given_later = isinstance(expected, property) and _is_annotated(cls, name)
    return is_given_later or getattr(expected, "is_optional", False)


def _is_annotated(cls: type, name: str) -> bool:
    return any(name in inspect.get_annotations(base) for base in cls.__mro__)


def _function(member: Any) -> Any:
    return member.__func__ if isinstance(member, (classmethod, staticmethod)) else member


def _what(expected: Any) -> str:
    if isinstance(expected, property):
        return "property"
    return (
        type(expected).__name__ if isinstance(expected, (classmethod, staticmethod)) else "method"
    )


def _shown(expected: Any) -> str:
    """Return the parameters as source text without annotations."""
    if isinstance(expected, property):
        return ""
    signature = inspect.signature(_function(expected))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    shown = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    return str(shown)


def _article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def _describe(item: object) -> str:
    module = getattr(item, "__module__", None)
    name = getattr(item, "__qualname__", None)
    return f"{module}:{name}" if module and name else repr(item)[:80]
