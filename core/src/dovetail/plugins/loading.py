"""Imports the object of a target ("module:Class" or "/file.py:Class").

Only this module runs the import of a plugin. Every exception of that code, `SystemExit` too,
becomes a PluginLoadError; only the user's Ctrl-C is raised unchanged.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import FrameType, ModuleType, TracebackType

from dovetail.errors import PluginLoadError, PluginNotFoundError, nearest

_MAX_NAMES = 8
MANY_OBJECTS = 10_000
"""If a block creates this many objects, `paused_garbage_collection` moves them."""

_getframeinfo = inspect.getframeinfo

LOCAL_PREFIX = "dovetail_local_"
"""Prefix of the names of modules that are loaded from a path."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The origin of a target, for messages.

    reference: the user's reference. distribution: "name version" of the distribution that declares
    the target; empty if the user wrote the target.
    """

    reference: str
    distribution: str = ""

    def __str__(self) -> str:
        if not self.distribution:
            return f"plugin {self.reference!r}"
        return f"plugin {self.reference!r} of {self.distribution}"


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector in a `with` block. Blocks may be nested.

    The import of a tensor library creates hundreds of thousands of long-lived objects, and each
    collection would visit them. If a block creates many objects, all objects then move to the
    oldest generation, so that collections of young objects do not visit them. If the program has
    frozen objects, nothing is moved.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        # The number of frozen objects is counted one by one, which takes up to 0.1 s.
        if gc.get_count()[0] >= MANY_OBJECTS and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        gc.enable()


@contextmanager
def no_source_lines() -> Iterator[None]:
    """Let `inspect.getframeinfo` return source lines only on request in a `with` block.

    The import of torch needs the position of each custom operator. To find the source lines,
    which torch does not use, `inspect` would resolve the paths of all imported modules. A call that
    states the number of lines, such as that of `inspect.stack`, is not changed.
    """
    if inspect.getframeinfo is not _getframeinfo:  # an outer block, or another library's function
        yield
        return
    inspect.getframeinfo = _getframeposition
    try:
        yield
    finally:
        if inspect.getframeinfo is _getframeposition:
            inspect.getframeinfo = _getframeinfo


def _getframeposition(
    frame: FrameType | TracebackType, context: int | None = None
) -> inspect.Traceback:
    if context is None:
        # A module may keep this function after the block, by `from inspect import getframeinfo`.
        context = 0 if inspect.getframeinfo is _getframeposition else 1
    return _getframeinfo(frame, context)


def load_target(target: str, origin: Origin) -> object:
    """Import the module of "module:Class" and return the class in it.

    Raises PluginNotFoundError if the user named a module or attribute that does not exist, and
    PluginLoadError if the import fails or a distribution declares an object that does not exist.
    """
    module_name, _, attribute = target.partition(":")
    return find_attribute(_import_module(module_name, origin), attribute, origin)


def load_dotted(target: str, origin: Origin) -> tuple[object, str]:
    """Load a dotted target such as "module.Class". Return the object and its exact target.

    A longer module name takes precedence over a nested class. Raises the errors of `load_target`.
    """
    module_name, _, attribute = target.partition(":")
    try:
        module = _import_module(module_name, origin)
    except PluginNotFoundError:
        nested = _find_nested(f"{module_name}.{attribute}", origin)
        if nested is None:
            raise
        return load_target(nested, origin), nested
    return find_attribute(module, attribute, origin), target


def _find_nested(dotted: str, origin: Origin) -> str | None:
    """Return "module:Outer.Inner" if a prefix of `dotted` is a module with a class Outer."""
    parts = dotted.split(".")
    for border in range(len(parts) - 2, 0, -1):
        try:
            module = _import_module(".".join(parts[:border]), origin)
        except PluginNotFoundError:
            continue
        if isinstance(vars(module).get(parts[border]), type):
            return f"{module.__name__}:{'.'.join(parts[border:])}"
    return None


def load_file(path: Path, origin: Origin) -> ModuleType:
    """Run the Python file at `path` as a new module and return the module.

    The module is added to `sys.modules` with a name derived from the path, because dataclasses and
    pickle need it. Raises PluginNotFoundError if the file does not exist, PluginLoadError if it
    fails.
    """
    if not os.path.isfile(path):
        raise PluginNotFoundError(f"Cannot load {origin}: the file {str(path)!r} does not exist.")
    name = f"{LOCAL_PREFIX}{path.stem}_{blake2b(bytes(path), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginLoadError(f"Cannot load {origin}: {str(path)!r} is not a Python file (.py).")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        del sys.modules[name]
        raise _import_failure(str(path), origin, error) from error
    return module


def find_attribute(module: ModuleType, attribute: str, origin: Origin) -> object:
    """Return `module.attribute`, where `attribute` may have dots.

    Raises the errors of `load_target` if the attribute does not exist.
    """
    value: object = module
    for part in attribute.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            raise _missing_attribute(module, value, part, origin) from None
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise _import_failure(f"{module.__name__}.{part}", origin, error) from error
    return value


def _import_module(name: str, origin: Origin) -> ModuleType:
    try:
        with paused_garbage_collection(), no_source_lines():
            return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except ModuleNotFoundError as error:
        # The missing module is the requested module, or a module that it imports.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _import_failure(name, origin, error) from error
        raise _missing_module(name, error.name, origin, str(error)) from None
    except BaseException as error:
        raise _import_failure(name, origin, error) from error


def _missing_module(
    name: str, missing: str, origin: Origin, cause: str
) -> PluginNotFoundError | PluginLoadError:
    if origin.distribution:
        return PluginLoadError(
            f"Cannot load {origin}: its entry point names module {name!r}, but there is no module "
            f"{missing!r}. The installation is incomplete: reinstall the distribution."
        )
    reason = f"there is no module {missing!r}"
    if "is not a package" in cause:
        reason += f" ({missing.rpartition('.')[0]!r} is a module, not a package)"
    return PluginNotFoundError(
        f"Cannot load {origin}: {reason}.\nInstall the package of the module, or add its "
        "directory to PYTHONPATH."
    )


def _missing_attribute(
    module: ModuleType, owner: object, part: str, origin: Origin
) -> PluginNotFoundError | PluginLoadError:
    if _is_private(module):
        return PluginNotFoundError(
            f"Cannot load {origin}: other processes cannot import classes of the main program. "
            "Move the class to a module that can be imported."
        )
    members = getattr(owner, "__dict__", {})
    # Names imported from other packages are not listed.
    names = [name for name in members if not name.startswith("_") and _is_of(module, members[name])]
    classes = [name for name in names if isinstance(members[name], type)]
    owned = f"its class {owner.__qualname__!r}" if isinstance(owner, type) else "it"
    listed = ", ".join(classes[:_MAX_NAMES]) or "none"
    more = ", …" if len(classes) > _MAX_NAMES else ""
    message = (
        f"Cannot load {origin}: module {module.__name__!r} was imported, but {owned} has no "
        f"attribute {part!r}.{nearest(part, names)}\n"
        f"Classes in the module: {listed}{more}."
    )
    if origin.distribution:
        return PluginLoadError(f"{message} The distribution declares a class that does not exist.")
    return PluginNotFoundError(message)


def _is_of(module: ModuleType, member: object) -> bool:
    """Return whether a class or function is defined in the package of `module`."""
    home = getattr(member, "__module__", None)
    if not isinstance(home, str) or not callable(member):
        return False
    return home.partition(".")[0] == module.__name__.partition(".")[0]


def _is_private(module: ModuleType) -> bool:
    """Return whether `module` is Dovetail's own main module, which has no classes of the user."""
    spec = module.__spec__
    return module.__name__ == "__main__" and spec is not None and spec.name.startswith("dovetail.")


def _import_failure(what: str, origin: Origin, error: BaseException) -> PluginLoadError:
    cause = type(error).__name__
    if lines := str(error).splitlines():
        cause = f"{cause}: {lines[0]}"
    failure = PluginLoadError(f"Cannot load {origin}: importing {what!r} failed with {cause}")
    if isinstance(error, ModuleNotFoundError):
        failure = PluginLoadError(f"{failure}\nInstall {error.name!r}, which the plugin needs.")
    return failure
