"""Tensors of the fake device: a wrapped host tensor with access checks.

`FakeDeviceTensor` reports to torch that it is on the fake device and has no memory that the host
can access. Every operation goes through `__torch_dispatch__`, which records its reads and writes
and whether a real device would make the host wait, and then computes on the host. Operations that a
device would reject raise an error: those on host and device tensors together, and those that change
the shape of `out`. In one respect it is stricter than devices: index tensors must be on the device.
In another it is less strict: for `x[3] = 1.0` some devices copy the number from the host; use
`x[3].fill_(1.0)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from dovetail_torch.attention_table import run_attend
from dovetail_torch.fake_device.device import DEVICE
from dovetail_torch.fake_device.memory import Piece
from dovetail_torch.fake_device.timeline import Place

HOST = torch.empty(0).device
NAME = "privateuseone"
"""The device type: torch's type for out-of-tree devices, with its default name. With another name
torch would treat the fake device as the accelerator of the whole process."""

aten = torch.ops.aten

_WAITING = frozenset(
    {
        "_local_scalar_dense",
        "_unique",
        "_unique2",
        "bincount",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
        "unique_dim_consecutive",
    }
)
"""Operations for which the host must know the result or its shape."""
_WHOLE = frozenset(
    {
        "einsum",
        "layer_norm",
        "linear",
        "matmul",
        "rms_norm",
        "scaled_dot_product_attention",
    }
)
"""Composite operations that run as one operation. Results are then bitwise equal to the host's."""


class FakeDeviceTensor(torch.Tensor):
    """A tensor of the fake device.

    host: a host tensor with the data. piece: the simulated device memory; None while
    `torch.compile` traces, where `host` has sizes and no data.
    """

    host: torch.Tensor
    piece: Piece | None
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type, host: torch.Tensor, piece: Piece | None) -> FakeDeviceTensor:
        """Wrap a host tensor that has no other owner."""
        self: FakeDeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),
        )
        self.host, self.piece = host, piece
        return self

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Return the name of the inner tensor, for `torch.compile`."""
        return ["host"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], _metadata: None, _size: object, _stride: object
    ) -> FakeDeviceTensor:
        """Return a tensor that is traced: it has sizes and no memory."""
        return FakeDeviceTensor(inner["host"], None)

    def tolist(self) -> Any:
        """Return the elements as a list. The host waits for them."""
        return self.to(HOST).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Raise TypeError: the host cannot access the memory."""
        raise TypeError(
            f"a tensor on {NAME!r} cannot be converted to an array; copy it to the host first."
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"FakeDeviceTensor(shape={list(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        DEVICE.watch.check()
        rule, kwargs = rule_of(func), dict(kwargs or {})
        if any(isinstance(item.host, FakeTensor) for item in _device_tensors(args)):
            return _trace(func, args, kwargs)
        if rule.run is not None:
            return rule.run(*args, **kwargs)
        return _compute(func, rule, args, kwargs)


def _device_tensors(values: Any) -> Iterator[FakeDeviceTensor]:
    return (item for item in tree_leaves(values) if isinstance(item, FakeDeviceTensor))


def _trace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the sizes of an operation's results while `torch.compile` traces it."""
    wrappers = {id(item.host): item for item in _device_tensors((args, kwargs))}

    def lower(value: Any) -> Any:
        return value.host if isinstance(value, FakeDeviceTensor) else value

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        wrapper = wrappers.get(id(value))
        return FakeDeviceTensor(value, None) if wrapper is None else wrapper

    if "device" in kwargs:
        kwargs["device"] = HOST
    args, kwargs = tree_map(lower, (args, kwargs))
    return tree_map(wrap, func(*args, **kwargs))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRule:
    """The effects of an operation. run: replacement function, or None.

    written: positions and names of the arguments that it writes to. waits: returns whether the host
    waits.
    """

    run: Callable[..., Any] | None
    written: tuple[tuple[int, str], ...]
    waits: Callable[[Sequence[Any], Mapping[str, Any]], bool]


@cache
def rule_of(func: Any) -> OpRule:
    """Return the effects of an operation."""
    arguments = func._schema.arguments
    name = func._schema.name.partition("::")[2]
    # Attention layers get tensors of the device, not of the host.
    run = {"copy_": copy, "_to_copy": _to_copy, "attend": run_attend}.get(name)
    if run is None and name not in _WHOLE and name not in _WAITING and func._can_decompose():
        run = func.decompose
    return OpRule(
        run=run,
        written=tuple(
            (index, argument.name)
            for index, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
        waits=_waiting_rule(name),
    )


def _waiting_rule(name: str) -> Callable[[Sequence[Any], Mapping[str, Any]], bool]:
    """Return a predicate of the arguments: whether the operation makes the host wait."""
    if name == "repeat_interleave":
        return lambda args, kwargs: kwargs.get("output_size") is None
    if name == "index":
        return lambda args, kwargs: _has_mask(args[1])
    if name in ("index_put", "index_put_", "_index_put_impl_"):
        # For one mask and one number, torch uses a masked fill and computes no indices.
        return lambda args, kwargs: _has_mask(args[1]) and args[2].numel() > 1
    return lambda args, kwargs: name in _WAITING


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(
        indice is not None and indice.dtype in (torch.bool, torch.uint8) for indice in indices
    )


class _Lowering:
    """Replaces device tensors by host tensors in the arguments of one operation.

    seen: the device tensors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.seen: list[FakeDeviceTensor] = []

    def lower(self, value: Any) -> Any:
        if isinstance(value, FakeDeviceTensor):
            self.seen.append(value)
            return value.host
        if isinstance(value, torch.Tensor) and value.dim():
            raise RuntimeError(
                f"{self._name} expects all tensors to be on the same device, but found one of "
                f"shape {list(value.shape)} on {value.device} together with tensors on {NAME!r}."
            )
        if isinstance(value, (list, tuple)):
            return type(value)(self.lower(item) for item in value)
        if isinstance(value, torch.Generator):
            raise RuntimeError(
                f"{self._name} received a host random generator for tensors on {NAME!r}."
            )
        return value


def _compute(func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if rule.waits(args, kwargs):
        DEVICE.synchronizes(str(func))
    target = kwargs.get("device")
    lowering = _Lowering(str(func))
    written = [args[index] if index < len(args) else kwargs.get(n) for index, n in rule.written]
    host_args = tuple(lowering.lower(item) for item in args)
    kwargs.pop("pin_memory", None)
    host_kwargs = {name: lowering.lower(item) for name, item in kwargs.items()}
    if target is not None:
        host_kwargs["device"] = HOST
    targets = [item for many in written for item in (many if isinstance(many, list) else [many])]
    written_here = [item for item in targets if isinstance(item, FakeDeviceTensor)]
    graph = DEVICE.watch.capturing
    if graph is None:
        account(lowering.seen, written_here)
        result = func(*host_args, **host_kwargs)
    else:
        pieces = pieces_of(lowering.seen), pieces_of(written_here)
        hosts = [item.host for item in written_here]
        result = graph.record(func, host_args, host_kwargs, hosts, pieces, account_pieces)
    for item in targets:
        if isinstance(item, FakeDeviceTensor) and item.host.shape != item.shape:
            raise RuntimeError(
                f"{func} resizes a tensor from {list(item.shape)} to "
                f"{list(item.host.shape)}; pass a tensor of the correct shape, as the fake "
                "device does not resize tensors."
            )
    if target is not None and torch.device(target).type == HOST.type:
        return result
    return _Lifting(lowering.seen).lift(result)


def account(read: Sequence[FakeDeviceTensor], written: Sequence[FakeDeviceTensor]) -> Place:
    """Add an operation on these tensors to the current stream. Raise FlightError for a race."""
    return account_pieces(pieces_of(read), pieces_of(written))


def pieces_of(tensors: Sequence[FakeDeviceTensor]) -> list[Piece]:
    """Return the device memory of tensors, which have memory."""
    return [item.piece for item in tensors if item.piece is not None]


def account_pieces(read: Sequence[Piece], written: Sequence[Piece]) -> Place:
    """Add an operation to the current stream. Raise FlightError for a race."""
    timeline, memory = DEVICE.timeline, DEVICE.memory
    with timeline.lock:
        stream = timeline.current
        moment = stream.give()
        for piece in read:
            memory.read(piece, stream, moment)
        for piece in written:
            memory.write(piece, stream, moment)
    return moment


def wrap(host: torch.Tensor) -> FakeDeviceTensor:
    """Return a new device tensor with the data of `host`, which has no other owner."""
    piece = DEVICE.memory.take(host.untyped_storage().nbytes())
    created = FakeDeviceTensor(host, piece)
    account((), (created,))
    return created


class _Lifting:
    """Wraps results as device tensors.

    An argument that is returned keeps its wrapper; views share memory.
    """

    def __init__(self, arguments: Sequence[FakeDeviceTensor]) -> None:
        self._same = {id(item.host): item for item in arguments}
        self._owners = {item.host.untyped_storage()._cdata: item for item in arguments}

    def lift(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) in self._same:
                return self._same[id(value)]
            owner = self._owners.get(value.untyped_storage()._cdata)
            return wrap(value) if owner is None else _view(value, owner)
        if isinstance(value, (list, tuple)):
            return type(value)(self.lift(item) for item in value)
        return value


def _view(host: torch.Tensor, owner: FakeDeviceTensor) -> FakeDeviceTensor:
    """Return a view in any mode. It is an inference tensor if `owner` is an inference tensor."""
    if owner.is_inference() == torch.is_inference_mode_enabled():
        return FakeDeviceTensor(host, owner.piece)
    with torch.inference_mode(owner.is_inference()):
        return FakeDeviceTensor(host, owner.piece)


def _to_copy(
    source: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
    **_: Any,
) -> torch.Tensor:
    """Implement `torch.Tensor.to` for the cases that copy."""
    like = torch.empty_like(
        source.host if isinstance(source, FakeDeviceTensor) else source,
        dtype=dtype,
        device=HOST,
        memory_format=torch.preserve_format if memory_format is None else memory_format,
    )
    to_device = source.device if device is None else torch.device(device)
    target = wrap(like) if to_device.type == NAME else like
    if target is like and non_blocking and like.is_contiguous():
        # The host memory is pinned, and its contents are not available yet, as on a device.
        pinned = DEVICE.flights.pinned_zeros(like.nbytes)
        target = pinned.view(like.dtype).view(like.shape)
    return copy(target, source, non_blocking)


def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy between the host and the device, or on the device."""
    if not target.numel():
        return target
    if isinstance(target, FakeDeviceTensor) and isinstance(source, FakeDeviceTensor):
        graph = DEVICE.watch.capturing
        if graph is None:
            account((source,), (target,))
            target.host.copy_(source.host)
        else:
            hosts = (target.host, source.host)
            pieces = pieces_of((source,)), pieces_of((target,))
            graph.record(torch.Tensor.copy_, hosts, {}, hosts[:1], pieces, account_pieces)
    elif isinstance(target, FakeDeviceTensor):
        _upload(target, source, non_blocking)
    else:
        assert isinstance(source, FakeDeviceTensor), "source or target must be on the fake device"
        _download(target, source, non_blocking)
    return target


def _upload(target: FakeDeviceTensor, source: torch.Tensor, non_blocking: bool) -> None:
    DEVICE.watch.reject_in_capture("a copy from the host")
    with DEVICE.timeline.lock:
        DEVICE.flights.claim(source, writes=False)
        moment = account((), (target,))
        if non_blocking and _can_fly(source, target):
            DEVICE.flights.begin_read(source, moment)
        else:
            DEVICE.synchronizes("a blocking, converting or unpinned copy from the host")
        target.host.copy_(source)


def _download(target: torch.Tensor, source: FakeDeviceTensor, non_blocking: bool) -> None:
    DEVICE.watch.reject_in_capture("a copy to the host")
    with DEVICE.timeline.lock:
        DEVICE.flights.claim(target, writes=True)
        moment = account((source,), ())
        if non_blocking and _can_fly(target, source):
            data = source.host.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            DEVICE.flights.begin_write(target, data, moment)
        else:
            DEVICE.synchronizes("a blocking, converting or unpinned copy to the host")
            target.copy_(source.host)


def _can_fly(host: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether a copy between the two tensors can be asynchronous."""
    alike = host.dtype == other.dtype and host.shape == other.shape
    return alike and host.is_contiguous() and DEVICE.flights.is_pinned(host)
