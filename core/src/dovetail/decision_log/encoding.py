"""Encodes requests, results and columns as payloads of a decision log.

Token ids are replaced by codes, numbered in the order of their first occurrence. Equal tokens stay
equal, so prefix hits and stop tokens are preserved, but the log does not contain the text. Cache
salts, which may be secrets, are replaced too. `plan_records` encodes plans.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from struct import Struct
from typing import Any

from dovetail.request import EncoderInput, EngineCoreRequest
from dovetail.result import ModelRunnerOutput
from dovetail.sampling_params import SamplingParams

_TEXTS = frozenset(
    {"stop", "bad_words", "logit_bias", "allowed_token_ids", "structured_outputs", "reasoning"}
)
"""Sampling parameters that no scheduler needs and that could reveal the prompt."""
_NUM_READINGS = Struct("<I")


class Codebook:
    """Assigns codes to objects: 0, 1, … in the order of their first occurrence."""

    def __init__(self) -> None:
        self._codes: dict[Any, int] = {}

    def code(self, item: Any) -> int:
        """Return the code of an object."""
        return self._codes.setdefault(item, len(self._codes))

    def codes(self, items: Iterable[Any]) -> array[int]:
        """Return the codes of several objects as an int32 array."""
        known = self._codes
        return array("i", [known.setdefault(item, len(known)) for item in items])


class Plain:
    """Keeps tokens unchanged, for a replay in which tokens are already codes."""

    def codes(self, items: Iterable[int]) -> array[int]:
        """Return `items` as an int32 array."""
        return array("i", items)


@dataclass(frozen=True, kw_only=True)
class Codebooks:
    """The codes of one log, for tokens, encoder contents and cache salts."""

    tokens: Codebook = field(default_factory=Codebook)
    contents: Codebook = field(default_factory=Codebook)
    salts: Codebook = field(default_factory=Codebook)


def encode_request(request: EngineCoreRequest, codes: Codebooks) -> bytes:
    """Return the fields of a request that a scheduler uses, as JSON with codes."""
    params, tokens = request.sampling_params, codes.tokens
    record: dict[str, Any] = {
        item.name: getattr(request, item.name)
        for item in fields(request)
        if item.name not in ("sampling_params", "bad_words_token_ids", "encoder_inputs")
    }
    record["prompt_token_ids"] = tokens.codes(request.prompt_token_ids).tolist()
    record["stop_token_ids"] = sorted(tokens.codes(sorted(request.stop_token_ids)))
    record["encoder_inputs"] = [
        [
            encoder_input.position,
            encoder_input.num_tokens,
            codes.contents.code(encoder_input.content_hash),
        ]
        for encoder_input in request.encoder_inputs
    ]
    if request.cache_salt:
        record["cache_salt"] = f"salt {codes.salts.code(request.cache_salt)}"
    shown = {
        item.name: getattr(params, item.name) for item in fields(params) if item.name not in _TEXTS
    }
    if params.stop_token_ids:
        shown["stop_token_ids"] = tokens.codes(params.stop_token_ids).tolist()
    shown["extra_args"] = _plain(params.extra_args)
    record["sampling_params"] = shown
    return json.dumps(record).encode()


def decode_request(payload: bytes) -> EngineCoreRequest:
    """Return the request of an ADD record. Its tokens are codes."""
    record = json.loads(payload)
    record["sampling_params"] = SamplingParams(**record["sampling_params"])
    record["prompt_token_ids"] = array("i", record["prompt_token_ids"])
    record["stop_token_ids"] = frozenset(record["stop_token_ids"])
    record["encoder_inputs"] = tuple(
        EncoderInput(position=position, num_tokens=length, content_hash=b"%d" % code)
        for position, length, code in record["encoder_inputs"]
    )
    return EngineCoreRequest(**record)


def encode_output(output: ModelRunnerOutput, tokens: Codebook | Plain) -> bytes:
    """Return the part of a step's result that a scheduler uses."""
    columns = [output.num_sampled, tokens.codes(output.token_ids), output.num_drafts]
    if output.errors:
        columns.append(array("i", output.errors))
    return pack_columns([array("q", (output.step_id,)), *columns])


def decode_output(payload: bytes) -> ModelRunnerOutput:
    """Return the result of an OUTPUT record. Its tokens are codes."""
    step, num_sampled, token_ids, num_drafts, *more = unpack_columns(payload)
    return ModelRunnerOutput(
        step_id=step[0],
        num_sampled=num_sampled,
        token_ids=token_ids,
        num_drafts=num_drafts,
        errors=dict.fromkeys(more[0], "") if more else {},
    )


def encode_names(names: Sequence[str]) -> bytes:
    """Encode arguments that are names, such as request ids."""
    return json.dumps(names).encode()


def decode_names(payload: bytes) -> list[str]:
    """Decode the result of `encode_names`."""
    names: list[str] = json.loads(payload)
    return names


def with_readings(readings: Sequence[int], payload: bytes) -> bytes:
    """Return `payload`, preceded by the clock readings of the call in nanoseconds."""
    return _NUM_READINGS.pack(len(readings)) + array("q", readings).tobytes() + payload


def split_readings(payload: bytes) -> tuple[list[int], bytes]:
    """Split the result of `with_readings` into clock readings and payload."""
    readings, begin = array("q"), _NUM_READINGS.size
    end = begin + readings.itemsize * _NUM_READINGS.unpack_from(payload)[0]
    readings.frombytes(payload[begin:end])
    return readings.tolist(), payload[end:]


def pack_columns(columns: Sequence[array[int]]) -> bytes:
    """Encode columns, each with its typecode and length."""
    parts = [len(columns).to_bytes(4, "little")]
    for column in columns:
        content = column.tobytes()
        parts += [column.typecode.encode(), len(content).to_bytes(4, "little"), content]
    return b"".join(parts)


def unpack_columns(payload: bytes) -> list[array[int]]:
    """Decode the result of `pack_columns`."""
    position, columns = 4, []
    for _ in range(int.from_bytes(payload[:4], "little")):
        column = array(chr(payload[position]))
        begin = position + 5
        position = begin + int.from_bytes(payload[position + 1 : begin], "little")
        column.frombytes(payload[begin:position])
        columns.append(column)
    return columns


def _plain(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values that JSON can represent."""
    return {
        name: value
        for name, value in values.items()
        if value is None or isinstance(value, bool | int | float | str)
    }
