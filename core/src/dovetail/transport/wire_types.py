"""Parts of messages that are objects, not columns: requests, parameters, log-probabilities.

Each class of the engine has a msgspec struct, whose fields msgspec checks as it decodes. The
structs are derived from the fields of the class, so a new field needs no change here. Decoding
checks types and creates the original object, which checks ranges. Decoding cannot call any other
code.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar, get_type_hints

import msgspec

from dovetail.errors import MessageError, RequestError
from dovetail.plan import NewRequest
from dovetail.request import EngineCoreRequest
from dovetail.result import LogprobColumns, PooledTensor
from dovetail.sampling_params import SamplingParams
from dovetail.transport.columns import check_lengths, counts32, int32

K = TypeVar("K")
T = TypeVar("T")


def _twin(original: type, replaced: Mapping[str, Any]) -> type[msgspec.Struct]:
    """Return a struct with the fields of a dataclass, some of them with different types."""
    # `array[int]` cannot be evaluated before Python 3.12; those fields are replaced here.
    hints = get_type_hints(original, localns={"array": list})
    created: list[Any] = []
    for field in fields(original):
        kind = replaced.get(field.name, hints[field.name])
        created.append((field.name, kind, *_default(field)))
    return msgspec.defstruct(
        f"Wire{original.__name__}",
        created,
        frozen=True,
        kw_only=True,
        omit_defaults=True,
        forbid_unknown_fields=True,
    )


def _default(field: Field[Any]) -> tuple[Any, ...]:
    if field.default_factory is not MISSING:
        return (msgspec.field(default_factory=field.default_factory),)
    if field.default is not MISSING:
        return (field.default,)
    return ()


_WireParams = _twin(
    SamplingParams,
    {
        "stop": tuple[str, ...] | None,
        "stop_token_ids": tuple[int, ...] | None,
        "allowed_token_ids": tuple[int, ...] | None,
        "bad_words": tuple[str, ...] | None,
        "logit_bias": dict[int, float] | None,
        "extra_args": dict[str, Any],
    },
)
_WireRequest = _twin(EngineCoreRequest, {"prompt_token_ids": bytes, "sampling_params": _WireParams})
_WireJoin = _twin(NewRequest, {"token_ids": bytes, "sampling_params": _WireParams})


class WireLogprobs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The form of `LogprobColumns` in a message: each column as bytes."""

    counts: bytes
    token_ids: bytes
    logprobs: bytes
    ranks: bytes

    @classmethod
    def of(cls, columns: LogprobColumns) -> WireLogprobs:
        """Return the columns as bytes."""
        return cls(
            counts=columns.counts.tobytes(),
            token_ids=columns.token_ids.tobytes(),
            logprobs=columns.logprobs.tobytes(),
            ranks=columns.ranks.tobytes(),
        )

    def columns(self) -> LogprobColumns:
        """Return the columns. Raise MessageError if their lengths are inconsistent."""
        counts, token_ids = counts32(self.counts, "counts"), counts32(self.token_ids, "token_ids")
        logprobs = array("f")
        if len(self.logprobs) != len(self.token_ids):
            raise MessageError("log-probabilities must have one float32 per token.")
        logprobs.frombytes(self.logprobs)
        ranks = int32(self.ranks, "ranks")
        check_lengths(len(counts), ranks=ranks)
        check_lengths(sum(counts), token_ids=token_ids)
        return LogprobColumns(counts=counts, token_ids=token_ids, logprobs=logprobs, ranks=ranks)


class WirePooled(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The form of `PooledTensor` in a message. values: float32 as bytes."""

    shape: tuple[int, ...]
    values: bytes

    def tensor(self) -> PooledTensor:
        """Return the result. Raise MessageError if the shape does not match the values."""
        values = array("f")
        num_values = math.prod(self.shape)
        if not 1 <= len(self.shape) <= 2 or min(self.shape) < 0:
            raise MessageError(f"a pooled result has the invalid shape {self.shape}.")
        if len(self.values) != num_values * values.itemsize:
            raise MessageError(
                f"a pooled result of shape {self.shape} has {len(self.values)} bytes, not "
                f"{num_values * values.itemsize}."
            )
        values.frombytes(self.values)
        return PooledTensor(shape=self.shape, values=values)


def wire_pooled(pooled: Mapping[K, PooledTensor]) -> dict[K, WirePooled]:
    """Convert the pooled results of several requests for a message."""
    return {key: WirePooled(item.shape, item.values.tobytes()) for key, item in pooled.items()}


def read_pooled(wire: Mapping[K, WirePooled]) -> dict[K, PooledTensor]:
    """Convert the result of `wire_pooled` back. Raise MessageError if it is not consistent."""
    return {key: item.tensor() for key, item in wire.items()}


def wire_logprobs(columns: Mapping[K, LogprobColumns]) -> dict[K, WireLogprobs]:
    """Convert the log-probabilities of several requests for a message."""
    return {key: WireLogprobs.of(column) for key, column in columns.items()}


def read_logprobs(wire: Mapping[K, WireLogprobs]) -> dict[K, LogprobColumns]:
    """Convert the result of `wire_logprobs` back. Raise MessageError if it is not consistent."""
    return {key: item.columns() for key, item in wire.items()}


def wire_request(request: EngineCoreRequest) -> bytes:
    """Encode a request. Raise RequestError if it cannot be sent, with the parameter if known."""
    packed = {field.name: getattr(request, field.name) for field in fields(request)}
    try:
        packed["prompt_token_ids"] = array("i", request.prompt_token_ids).tobytes()
    except (TypeError, OverflowError):
        raise RequestError(
            "the prompt's tokens must be 32-bit integers.", parameter="prompt"
        ) from None
    packed["sampling_params"] = _params(request.sampling_params)
    try:
        return encode(_WireRequest(**packed))
    except MessageError as error:
        raise RequestError(f"the request cannot be sent to the engine's process: {error}") from None


def read_request(content: bytes) -> EngineCoreRequest:
    """Decode a request that `wire_request` encoded. Its prompt becomes an array of int32.

    Raises MessageError if the bytes are not valid, and RequestError if a sampling parameter is out
    of range.
    """
    packed = decode(content, _WireRequest)
    values = {name: getattr(packed, name) for name in packed.__struct_fields__}
    values["prompt_token_ids"] = int32(values["prompt_token_ids"], "prompt_token_ids")
    values["sampling_params"] = _read_params(values["sampling_params"])
    return EngineCoreRequest(**values)


def wire_join(join: NewRequest) -> msgspec.Struct:
    """Convert a new request of a plan to a struct that can be sent."""
    packed = {field.name: getattr(join, field.name) for field in fields(join)}
    packed["token_ids"] = join.token_ids.tobytes()
    packed["sampling_params"] = _params(join.sampling_params)
    return _WireJoin(**packed)


class WirePlanTail(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The parts of a plan that are not columns."""

    joins: tuple[_WireJoin, ...]  # type: ignore[valid-type]  # made above
    encoder_frees: tuple[bytes, ...]
    kv_transfer: bytes


def read_join(packed: Any) -> NewRequest:
    """Convert a decoded new request to an object of the plan.

    Raise MessageError if it is not valid.
    """
    values = {name: getattr(packed, name) for name in packed.__struct_fields__}
    values["token_ids"] = counts32(values["token_ids"], "token_ids")
    if values["row"] < 0 or not 0 < values["num_prompt_tokens"] <= len(values["token_ids"]):
        raise MessageError(
            f"a new request has the row {values['row']} and {values['num_prompt_tokens']} "
            f"prompt tokens among {len(values['token_ids'])} tokens, which is not valid."
        )
    try:
        values["sampling_params"] = _read_params(values["sampling_params"])
    except RequestError as error:
        raise MessageError(
            f"the sampling parameters of a new request are not valid: {error}"
        ) from None
    return NewRequest(**values)


def encode(value: Any, other: Callable[[Any], Any] | None = None) -> bytes:
    """Encode `value` as msgpack. Raise MessageError if msgpack does not support it.

    other: converts a type that msgpack does not support to a plain value, or raises TypeError.
    """
    try:
        return msgspec.msgpack.encode(value, enc_hook=other)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(f"a value cannot be sent: {error}") from None


def decode(
    content: bytes | memoryview, kind: type[T], other: Callable[[type, Any], Any] | None = None
) -> T:
    """Decode `content` as type `kind`, which may be a union. Raise MessageError on failure.

    other: creates a value of a type that msgpack does not support.
    """
    try:
        return msgspec.msgpack.decode(
            content, type=kind, ext_hook=_reject_extension, dec_hook=other
        )
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MessageError(f"{len(content)} bytes cannot be decoded: {error}") from None


def _params(params: SamplingParams) -> Any:
    return _WireParams(**{field.name: getattr(params, field.name) for field in fields(params)})


def _read_params(packed: Any) -> SamplingParams:
    return SamplingParams(**{name: getattr(packed, name) for name in packed.__struct_fields__})


def _reject_extension(code: int, data: memoryview) -> Any:
    raise ValueError(f"extension type {code} is not supported")
