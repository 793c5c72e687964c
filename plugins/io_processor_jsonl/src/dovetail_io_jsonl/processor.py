"""The IO processor `jsonl`: converts rows to prompts and outputs to rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar

from dovetail.errors import RequestError, nearest
from dovetail.interfaces import (
    IOBatch,
    IOProcessor,
    IOProcessorContext,
    IOPrompt,
    IORequest,
    IOResult,
)
from dovetail.sampling_params import SamplingParams
from dovetail.value_checks import shorten
from dovetail_io_jsonl.rows import Row, read_rows

_FORMS = ("prompt", "messages", "prompt_token_ids")
_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))
_KNOWN = ("id", *_FORMS, "priority", *sorted(_SAMPLING_FIELDS))


class JSONLProcessor(IOProcessor):
    """Converts input rows to requests and their outputs to result rows, in the same order.

    An input row has `prompt`, `messages` or `prompt_token_ids`. Optional are `id` (a unique string
    or integer; default: the row's index), `priority`, and any field of SamplingParams, which
    overrides the value of the call. All rows are checked before a request runs: an invalid row
    raises RequestError with its line. A result row has `id`, `text` and `finish_reason`. With n > 1
    there is one row for each completion, with its `index`. The row of a rejected or failed request
    has `id` and `error`.
    """

    CONTRACT_VERSION: ClassVar[str] = "0.3"
    example_data: ClassVar[Any] = [
        {"id": "a", "prompt": "Two roads diverged", "max_tokens": 8, "temperature": 0},
        {"messages": [{"role": "user", "content": "What is a row?"}]},
    ]

    def __init__(self, context: IOProcessorContext) -> None:
        self._tokenizer = context.tokenizer
        self._default = context.default_sampling

    def pre_process(self, request: IORequest) -> IOBatch:
        """Return one prompt for each row. The state contains the ids of the rows."""
        params = request.sampling_params or self._default
        prompts: list[IOPrompt] = []
        ids: dict[str | int, str] = {}
        for where, row in read_rows(request.data):
            row_id = row.get("id", len(prompts))
            if not isinstance(row_id, (str, int)) or isinstance(row_id, bool):
                raise _rejection(where, f"id={shorten(row_id)} must be a string or an integer")
            if row_id in ids:
                raise _rejection(where, f"id={shorten(row_id)} is already used in {ids[row_id]}")
            ids[row_id] = where
            try:
                prompts.append(self._prompt(row, params))
            except RequestError as error:
                raise _rejection(where, str(error)) from None
        return IOBatch(prompts=tuple(prompts), state=tuple(ids))

    def post_process(self, result: IOResult) -> list[dict[str, Any]]:
        """Return the result rows."""
        rows: list[dict[str, Any]] = []
        for row_id, output in zip(result.batch.state, result.outputs, strict=True):
            if output.error is not None:
                rows.append({"id": row_id, "error": output.error})
                continue
            several = len(output.outputs) > 1
            rows.extend(
                {
                    "id": row_id,
                    **({"index": item.index} if several else {}),
                    "text": item.text,
                    "finish_reason": item.finish_reason,
                }
                for item in output.outputs
            )
        return rows

    def _prompt(self, row: Row, params: SamplingParams) -> IOPrompt:
        if unknown := [key for key in row if key not in _KNOWN]:
            hint = nearest(unknown[0], _KNOWN) if isinstance(unknown[0], str) else ""
            raise RequestError(f"a row cannot have the field {shorten(unknown[0])}.{hint}")
        forms = [form for form in _FORMS if form in row]
        if len(forms) != 1:
            description = " and ".join(forms) or "no prompt"
            raise RequestError(
                f"the row must have exactly one of {', '.join(_FORMS)}; got {description}"
            )
        changes = {key: value for key, value in row.items() if key in _SAMPLING_FIELDS}
        if isinstance(changes.get("logit_bias"), Mapping):
            changes["logit_bias"] = _with_integer_keys(changes["logit_bias"])
        priority = row.get("priority", 0)
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise RequestError(f"priority={shorten(priority)} must be an integer")
        return IOPrompt(
            prompt=self._text_or_tokens(forms[0], row[forms[0]]),
            sampling_params=replace(params, **changes),
            priority=priority,
        )

    def _text_or_tokens(self, form: str, value: Any) -> Any:
        if form == "prompt_token_ids":
            return {"prompt_token_ids": value}
        if form == "prompt":
            if not isinstance(value, str):
                raise RequestError(f"prompt={shorten(value)} must be a string")
            return value
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise RequestError(
                f"messages={value!r:.80} must be a list of objects with role and content"
            )
        if self._tokenizer is None:
            raise RequestError("messages need a tokenizer, but this engine has no tokenizer")
        text = self._tokenizer.apply_chat_template(value)
        return {"prompt_token_ids": self._tokenizer.encode(text, add_special_tokens=False)}


def _with_integer_keys(bias: Mapping[str, Any]) -> dict[int, Any]:
    """Return a logit bias with integer keys. In JSON all keys are strings."""
    try:
        return {int(token): value for token, value in bias.items()}
    except (TypeError, ValueError):
        message = f"logit_bias has the keys {shorten(list(bias))}; all keys must be token ids"
        raise RequestError(message) from None


def _rejection(where: str, reason: str) -> RequestError:
    end = "" if reason.endswith((".", "?")) else "."
    return RequestError(f"{where}: {reason}{end}", parameter="data")
