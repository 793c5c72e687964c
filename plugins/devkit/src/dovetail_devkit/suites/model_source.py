"""The conformance suite of the model source contract.

The suite uses the arguments in the attribute `examples` of the source, if this attribute exists.
The models must be on this machine, or `fetch` must be able to download them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from dovetail.errors import ModelError
from dovetail.interfaces.model_source import ModelSource, ModelSourceContext
from dovetail_devkit.expectation import checking, expect

INVALID = ("../x", "a/../../x", "x\x00y", "\n", " ", "a" * 10_000, "-r /etc/passwd", "--help")


@checking("model_source")
def check_model_source(
    source_cls: type[ModelSource],
    *,
    arguments: Sequence[str] | None = None,
    options: Mapping[str, object] | None = None,
) -> None:
    """Check a source against its contract. Raise AssertionError with the violated rule.

    arguments: valid arguments; the suite fetches their models. None for the source's `examples`.
    """
    if arguments is None:
        arguments = getattr(source_cls, "examples", ())
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        lines: list[str] = []

        def make() -> ModelSource:
            context = ModelSourceContext(
                cache_dir=cache, report=lines.append, options=options or {}
            )
            return source_cls(context)

        make()
        expect(not cache.exists(), "the constructor must not create the cache directory")
        for argument in INVALID:
            _check_invalid(make(), argument, cache)
        for argument in arguments:
            _check_fetch(make, argument)
        expect(all(isinstance(line, str) for line in lines), "each progress report must be a str")
        _check_listing(make(), at_least=len(set(arguments)))


def _check_invalid(source: ModelSource, argument: str, cache: Path) -> None:
    for name in ("find", "fetch"):
        try:
            result = getattr(source, name)(argument)
        except ModelError:
            continue
        expect(False, f"{name}({argument[:20]!r}) must raise ModelError, but returns {result!r}")
    left = list(cache.rglob("*")) if cache.exists() else []
    files = [path for path in left if path.is_file()]
    expect(not files, f"the invalid argument {argument[:20]!r} left files: {files[:3]}")


def _check_fetch(make: object, argument: str) -> None:
    assert callable(make)
    path = make().fetch(argument)
    expect(isinstance(path, Path), f"fetch() returned {type(path).__name__}; it must return a Path")
    expect(path.exists(), f"fetch() returned {path}, which does not exist")
    again = make().find(argument)
    expect(again == path, f"after fetch(), find() returned {again}; it must return {path}")
    expect(make().fetch(argument) == path, "two calls of fetch() must return the same path")


def _check_listing(source: ModelSource, *, at_least: int) -> None:
    models = list(source.local_models())
    expect(
        len(models) >= at_least,
        f"local_models lists only {len(models)} of {at_least} fetched models",
    )
    for model in models:
        expect(model.path.exists(), f"local_models lists {model.path}, which does not exist")
        expect(bool(model.name), "local_models lists a model with an empty name")
