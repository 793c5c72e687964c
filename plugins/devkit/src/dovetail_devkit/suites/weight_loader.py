"""The conformance suite of the weight loader contract, for any loader with a small checkpoint.

The model's weights are NaN before loading, and every write to them is counted. A loader that reads
files must reject damaged files. This module imports torch, so import this module only to test
loaders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.errors import WeightError
from dovetail.interfaces.weight_loader import WeightLoader, WeightLoaderContext
from dovetail_devkit.case import Case
from dovetail_devkit.expectation import SkipCase, checking, expect, expect_error

MakeModel = Callable[[], Any]
"""Return a new model for the checkpoint, with uninitialized weights."""

KEPT = ".json"
"""Suffixes of checkpoint files that the suite does not truncate."""


class _WriteCounter(TorchDispatchMode):  # type: ignore[misc]  # mypy does not see torch
    """Counts how many elements are written to the storages of some tensors.

    Source of the mode: the PyTorch documentation, "torch.utils._python_dispatch".
    """

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self.counts = dict.fromkeys(storages, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value, argument in zip(args, func._schema.arguments, strict=False):
            alias = argument.alias_info
            if isinstance(value, torch.Tensor) and alias is not None and alias.is_write:
                self._count(value)
        return func(*args, **(kwargs or {}))

    def _count(self, tensor: torch.Tensor) -> None:
        storage = _storage(tensor)
        if storage in self.counts:
            self.counts[storage] += tensor.numel()


@checking("weight_loader")
def check_weight_loader(
    loader_cls: type[WeightLoader],
    model_dir: Path,
    make_model: MakeModel,
    *,
    name_in_file: NameInFile = str,
) -> None:
    """Check a weight loader against its contract. Raise AssertionError with the violated rule.

    model_dir: a checkpoint that the loader can read. make_model: returns the checkpoint's model.
    name_in_file: returns the name in the checkpoint of a weight of the model.
    """
    cases = weight_loader_cases(loader_cls, model_dir, make_model, name_in_file=name_in_file)
    for case in cases:
        with suppress(SkipCase):
            case.run()


def weight_loader_cases(
    loader_cls: type[WeightLoader],
    model_dir: Path,
    make_model: MakeModel,
    *,
    name_in_file: NameInFile = str,
) -> Iterator[Case]:
    """Yield the suite's cases. The arguments are the same as for `check_weight_loader`."""
    arguments = loader_cls, model_dir, make_model
    reads = cache(lambda: _load(loader_cls, model_dir, make_model()) > 0)

    def check_files(check: _Check) -> None:
        if not reads():
            raise SkipCase("the loader does not read files")
        check(*arguments)

    yield Case(name="the constructor reads no files", run=partial(_check_new, *arguments))
    yield Case(
        name="each weight is written once, in place", run=partial(_load_and_count, *arguments)
    )
    yield Case(name="a second load gives the same weights", run=partial(_check_again, *arguments))
    yield Case(name="damaged files are rejected", run=partial(check_files, _check_broken_files))
    yield Case(
        name="checkpoints of other models are rejected",
        run=partial(check_files, partial(_check_other_models, name_in_file=name_in_file)),
    )


_Check = Callable[[type[WeightLoader], Path, MakeModel], None]
NameInFile = Callable[[str], str]
"""Returns the checkpoint's name for a weight of the model."""


def _check_new(loader_cls: type[WeightLoader], model_dir: Path, make_model: MakeModel) -> None:
    loader_cls(WeightLoaderContext(model_dir=model_dir / "nowhere", progress=False))


def _check_again(loader_cls: type[WeightLoader], model_dir: Path, make_model: MakeModel) -> None:
    models = make_model(), make_model()
    for model in models:
        _poison(model)
    first, again = (_load(loader_cls, model_dir, model) for model in models)
    expect(
        first == again,
        f"two calls of load() return {first} and {again} bytes; they must return the same number",
    )
    for (name, item), other in zip(
        _weights(models[0]), models[1].state_dict().values(), strict=True
    ):
        expect(torch.equal(item, other), f"two calls of load() must give equal values of {name}")


def _load(loader_cls: type[WeightLoader], model_dir: Path, model: Any) -> int:
    loader = loader_cls(WeightLoaderContext(model_dir=model_dir, progress=False))
    return loader.load(model)


def _load_and_count(loader_cls: type[WeightLoader], model_dir: Path, make_model: MakeModel) -> None:
    model = make_model()
    _poison(model)
    sizes = {_storage(tensor): tensor.numel() for _, tensor in _weights(model)}
    addresses = {name: tensor.data_ptr() for name, tensor in _weights(model)}
    with _WriteCounter(set(sizes)) as writes:
        num_bytes = _load(loader_cls, model_dir, model)
    expect(
        isinstance(num_bytes, int) and num_bytes >= 0,
        f"load() returns {num_bytes!r}; expected the number of bytes that were read",
    )
    for name, tensor in _weights(model):
        expect(
            tensor.data_ptr() == addresses[name],
            f"load() replaced the tensor of {name}; it must write into the tensor of the model",
        )
        nan = tensor.is_floating_point() and bool(tensor.isnan().any())
        expect(not nan, f"load() did not write all elements of {name}")
        count, size = writes.counts[_storage(tensor)], sizes[_storage(tensor)]
        expect(
            count == size,
            f"load() wrote {count} elements of {name}, which has {size}; write each of them once",
        )


def _check_broken_files(
    loader_cls: type[WeightLoader], model_dir: Path, make_model: MakeModel
) -> None:
    with TemporaryDirectory() as folder:
        broken = copytree(model_dir, Path(folder) / "broken")
        for path in broken.rglob("*"):
            if path.is_file() and path.suffix != KEPT:
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        empty = Path(folder) / "empty"
        empty.mkdir()
        for directory, rule in (
            (broken, "load must reject truncated files"),
            (empty, "load must reject a directory without files"),
        ):
            error = expect_error(
                WeightError,
                partial(_load, loader_cls, directory, make_model()),
                rule,
            )
            expect(
                str(directory) in str(error),
                f"{rule} with an error that names the file; its message is: {error}",
            )


def _stored(name: str, name_in_file: NameInFile) -> str:
    """Return a weight's name in the checkpoint, or the model's name if it is not stored."""
    try:
        return name_in_file(name)
    except KeyError:
        return name


def _check_other_models(
    loader_cls: type[WeightLoader],
    model_dir: Path,
    make_model: MakeModel,
    *,
    name_in_file: NameInFile,
) -> None:
    """Check that `load` rejects a checkpoint of another model with an error about the weight."""
    for change, rule in (
        (_add_weight, "load must reject a checkpoint in which a weight is missing"),
        (_drop_weight, "load must reject a checkpoint with an unexpected weight"),
        (_reshape_weight, "load must reject a checkpoint with a weight of a different shape"),
    ):
        model = make_model()
        name = change(model)
        error = expect_error(
            WeightError,
            partial(_load, loader_cls, model_dir, model),
            rule,
        )
        expect(
            name in str(error) or _stored(name, name_in_file) in str(error),
            f"{rule}, and the message must contain the weight's name {name}; it is: {error}",
        )


def _add_weight(model: Any) -> str:
    model.register_parameter("nobody_has_this", nn.Parameter(torch.empty(3), requires_grad=False))
    return "nobody_has_this"


def _drop_weight(model: Any) -> str:
    module, leaf, name = _first_vector(model)
    delattr(module, leaf)
    return name


def _reshape_weight(model: Any) -> str:
    module, leaf, name = _first_vector(model)
    size = getattr(module, leaf).numel()
    setattr(module, leaf, nn.Parameter(torch.empty(size + 1), requires_grad=False))
    return name


def _first_vector(model: Any) -> tuple[Any, str, str]:
    """Return owner, attribute and name of a one-dimensional weight, such as a norm's."""
    name = next(name for name, weight in model.named_parameters() if weight.ndim == 1)
    owner, _, leaf = name.rpartition(".")
    return model.get_submodule(owner), leaf, name


def _weights(model: Any) -> list[tuple[str, torch.Tensor]]:
    return list(model.state_dict().items())


def _storage(tensor: torch.Tensor) -> int:
    pointer: int = tensor.untyped_storage().data_ptr()
    return pointer


def _poison(model: Any) -> None:
    with torch.no_grad():
        for _, tensor in _weights(model):
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
