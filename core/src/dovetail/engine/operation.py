"""Engine operations: derives messages, checks and client methods from their signatures.

The operations are declared in `dovetail.engine.port`. This module does not depend on sockets or an
engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import reduce
from operator import or_
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from dovetail.errors import MessageError, RequestError, UserError
from dovetail.interfaces.scheduler import EngineCoreOutputs
from dovetail.request import EngineCoreRequest
from dovetail.transport.wire_types import decode, encode, wire_request
from dovetail.value_checks import shorten

if TYPE_CHECKING:
    from dovetail.engine.core import EngineCore

P = ParamSpec("P")
R = TypeVar("R")


class SyncCaller(Protocol):
    """A client that one thread calls."""

    def call(self, operation: Operation[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Call an operation and return its result."""

    def get_outputs(self, timeout_s: float | None = None) -> EngineCoreOutputs | None:
        """Return the next outputs."""


class AsyncCaller(Protocol):
    """A client that coroutines of one event loop call."""

    async def call(self, operation: Operation[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Call an operation and return its result."""

    async def get_outputs(self) -> EngineCoreOutputs:
        """Return the next outputs."""


class Operation(Generic[P, R]):
    """One engine operation, which is a method of every client.

    name: name of the operation and of the method of `EngineCore` that implements it.
    expects_response: False if the caller does not wait; results are sent with the outputs.
    while_paused: whether it may be called while the engine is paused. takes_requests: the operation
    sends requests, which the engine reads one by one, in time slices between two steps.
    """

    def __init__(
        self,
        declared: Callable[Concatenate[Any, P], R],
        *,
        expects_response: bool,
        while_paused: bool,
    ) -> None:
        """Read the signature. Raises TypeError if an argument or the result has no type."""
        self.name = declared.__name__
        self.expects_response = expects_response
        self.while_paused = while_paused
        self.__doc__ = declared.__doc__
        signature = inspect.signature(declared)
        self._signature = signature
        hints = get_type_hints(declared, include_extras=True)
        self._names = list(signature.parameters)[1:]
        missing = [name for name in (*self._names, "return") if name not in hints]
        if missing:
            raise TypeError(f"The operation {self.name!r} needs a type for {missing[0]!r}.")
        self._hints = [hints[name] for name in self._names]
        self._result: Any = hints["return"]
        self._arguments: Any = tuple[tuple(map(_wire_type, self._hints))]  # type: ignore[misc]
        self.takes_requests = any(map(_is_request, self._hints))

    @overload
    def __get__(self, instance: None, owner: type) -> Operation[P, R]: ...
    @overload
    def __get__(self, instance: SyncCaller, owner: type) -> Callable[P, R]: ...
    @overload
    def __get__(
        self, instance: AsyncCaller, owner: type
    ) -> Callable[P, Coroutine[Any, Any, R]]: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        """Return the operation if read from the class, or a callable if read from a client."""
        if instance is None:
            return self

        def call(*args: Any, **kwargs: Any) -> Any:
            return instance.call(self, self.bind(*args, **kwargs))

        return call

    def bind(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the arguments by position, with defaults. Raise TypeError as a call does."""
        bound = self._signature.bind(None, *args, **kwargs)
        bound.apply_defaults()
        values = [bound.arguments[name] for name in self._names]
        for index, hint in enumerate(self._hints):
            if get_origin(hint) is Iterable:
                values[index] = tuple(values[index])
        return tuple(values)

    def encode_arguments(self, arguments: tuple[Any, ...]) -> bytes:
        """Encode the arguments.

        Raises UserError, which names the argument, for a callable and for values that are not plain
        data or have a wrong type.
        """
        for value, hint in zip(arguments, self._hints, strict=True):
            if _takes_callable(hint) and not isinstance(value, str):
                raise UserError(
                    f"{shorten(value)} cannot be sent to the engine's process. Pass the name of a "
                    "worker's method (worker_extension_cls adds methods), or omit engine_process."
                )
        try:
            content = encode(arguments)
            self.decode_arguments(content)  # so that the error is raised in the caller
        except MessageError as error:
            raise self._argument_error(arguments, error) from None
        return content

    def _argument_error(self, arguments: tuple[Any, ...], error: MessageError) -> UserError:
        """Return an error that names the first argument that cannot be sent. error: its cause."""
        for name, value, hint in zip(self._names, arguments, self._hints, strict=True):
            kind: Any = tuple[(_wire_type(hint),)]  # type: ignore[misc]
            try:
                decode(encode((value,)), kind)
            except MessageError as cause:
                return UserError(
                    f"{self.name}: {name}={shorten(value)} cannot be sent to the engine: {cause}",
                )
        return UserError(f"{self.name}: the arguments cannot be sent to the engine: {error}")

    def decode_arguments(self, content: bytes | memoryview) -> tuple[Any, ...]:
        """Decode the arguments and check their types. Raise MessageError for invalid bytes."""
        arguments: tuple[Any, ...] = decode(content, self._arguments)
        return arguments

    def encode_result(self, value: R) -> bytes:
        """Encode the result. Raise MessageError for values that are not plain data."""
        return encode(value, _encode_error)

    def decode_result(self, content: bytes | memoryview) -> R:
        """Decode the result and check its type. Raise MessageError for invalid bytes."""
        result: R = decode(content, self._result, _decode_error)
        return result

    def perform(self, core: EngineCore, arguments: Sequence[Any]) -> R:
        """Call the core's method. Raises UserError if it is not allowed while paused."""
        if core.paused is not None and not self.while_paused:
            raise UserError(f"{self.name} cannot be called while the engine is paused; resume it.")
        named_arguments = dict(zip(self._names, arguments, strict=True))
        result: R = getattr(core, self.name)(**named_arguments)
        return result


def operation(
    *, expects_response: bool = True, while_paused: bool = True
) -> Callable[[Callable[Concatenate[Any, P], R]], Operation[P, R]]:
    """Declare a method of `EnginePort` as an engine operation.

    See `Operation` for the arguments.
    """

    def declare(declared: Callable[Concatenate[Any, P], R]) -> Operation[P, R]:
        return Operation(declared, expects_response=expects_response, while_paused=while_paused)

    return declare


PackedRequest = tuple[str, bytes]
"""An encoded request: its id, and the result of `wire_request`."""


def pack_request(request: EngineCoreRequest) -> PackedRequest:
    """Encode a request. Raise RequestError if it cannot be sent."""
    return request.request_id, wire_request(request)


def _wire_type(hint: Any) -> Any:
    """Return the type of an argument in a message."""
    if hint is EngineCoreRequest:
        return PackedRequest
    if _is_request(hint):
        return tuple[PackedRequest, ...]
    if _takes_callable(hint):
        kinds = [item for item in get_args(hint) if get_origin(item) is not Callable]
        return reduce(or_, kinds)
    if get_origin(hint) is Iterable:
        return tuple[(*get_args(hint), ...)]  # type: ignore[misc]
    return hint


def _is_request(hint: Any) -> bool:
    return hint is EngineCoreRequest or get_args(hint) == (EngineCoreRequest,)


def _takes_callable(hint: Any) -> bool:
    is_union = get_origin(hint) in (Union, UnionType)
    return is_union and any(get_origin(item) is Callable for item in get_args(hint))


def _encode_error(value: object) -> object:
    if isinstance(value, RequestError):
        return str(value), value.parameter
    raise TypeError(f"a {type(value).__qualname__} is not plain data")


def _decode_error(kind: type, value: Any) -> object:
    if kind is RequestError and isinstance(value, list) and len(value) == 2:
        return RequestError(str(value[0]), parameter=str(value[1]))
    raise MessageError(f"expected {kind.__name__}, got {type(value).__name__}")
