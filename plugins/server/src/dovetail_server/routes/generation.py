"""Serves the prompts of one generation request, as one response or as a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from dovetail.engine.async_llm import AsyncLLM
from dovetail.errors import RequestError
from dovetail.inputs import Prompt
from dovetail.outputs import (
    CompletionOutput,
    PoolingRequestOutput,
    RequestOutput,
    RequestOutputKind,
)
from dovetail_server.protocol.errors import APIError, api_error, unavailable
from dovetail_server.protocol.logprobs import LOWEST, add_all, prompt_logprobs_body
from dovetail_server.protocol.messages import ChoiceReader, Reading
from dovetail_server.protocol.response_forms import ResponseForm
from dovetail_server.protocol.sampling import COPIED, Sampling
from dovetail_server.protocol.usage import Usage
from dovetail_server.routes.call_options import FIRST_TOKEN_HEADER, TIMEOUT_HEADER
from dovetail_server.transport.exchange import Exchange

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Call:
    """A checked generation request.

    prompts: the prompts for the engine, in order. form: the response format. echo: whether
    the text of a prompt precedes its completions. with_ids: whether the token ids are returned.
    timeout_s: time limit, or None. reading: how the text of the choices is read; None if the whole
    text is content.
    outputs: the last output of each prompt so far. num_tokens: generated tokens of each.
    finish_reasons: reasons of the ended completions. usage: the token counts so far.
    """

    prompts: Sequence[Prompt]
    sampling: Sampling
    form: ResponseForm
    priority: int = 0
    timeout_s: float | None = None
    echo: bool = False
    with_ids: bool = False
    reading: Reading | None = None
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    num_tokens: dict[int, int] = field(default_factory=dict)
    finish_reasons: list[str] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)


class Generation:
    """Serves one call. llm: the engine."""

    def __init__(self, llm: AsyncLLM, exchange: Exchange, call: Call) -> None:
        self._llm = llm
        self._exchange = exchange
        self._call = call

    async def answer(self) -> dict[str, Any]:
        """Return the complete response. Raise APIError if a prompt fails."""
        call = self._call
        indexes = range(len(call.prompts))
        finished = await all_of([self._named(index, self._finish(index)) for index in indexes])
        choices: list[dict[str, Any]] = []
        prompt_fields: dict[str, Any] = {}
        for index, output in enumerate(finished):
            call.usage.add_prompt(output)
            prompt_fields = await _prompt_fields(call, output)
            created = await self._choices(output, index * call.sampling.num_returned)
            if call.form.has_batches:
                created = [{**choice, **prompt_fields} for choice in created]
            choices += created
        body = await call.form.complete(choices, call.usage)
        return body if call.form.has_batches else {**body, **prompt_fields}

    async def stream(self) -> None:
        """Send the responses as events, then the end of the stream. Raise APIError on failure."""
        call, exchange = self._call, self._exchange
        if len(call.prompts) == 1:
            last = await self._named(0, self._stream_one(0))
        else:
            last = b""
            indexes = range(len(call.prompts))
            await all_of([self._named(index, self._stream_and_write(index)) for index in indexes])
        await exchange.end(last + await call.form.finish(call.usage))

    # --- one prompt ---------------------------------------------------------------------------

    def _request(self, index: int) -> dict[str, Any]:
        """Return the arguments of `AsyncLLM.generate` for a prompt."""
        call = self._call
        return {
            "prompt": call.prompts[index],
            "params": call.sampling.params,
            "request_id": f"{call.form.id}-{index}",
            "priority": call.priority,
            "timeout_s": call.timeout_s,
        }

    async def _named(self, index: int, work: Awaitable[R]) -> R:
        """Await `work`. Raise its errors with the names of the request's fields."""
        try:
            return await work
        except RequestError as error:
            rejection = api_error(error, self._call.sampling.names)
            if rejection.param == "prompt" and len(self._call.prompts) > 1:
                rejection.param = f"prompt[{index}]"
            raise rejection from None

    async def _finish(self, index: int) -> RequestOutput:
        kind = RequestOutputKind.FINAL_ONLY
        stream = self._llm.generate(**self._request(index), output_kind=kind)
        async with aclosing(stream) as outputs:
            async for output in outputs:
                self._call.outputs[index] = output
        raise_failure(output, self._call.sampling.names)
        if not self._call.sampling.without_output:
            num_tokens = sum(len(item.token_ids) for item in output.outputs)
            self._call.usage.num_completion_tokens += num_tokens
            self._call.num_tokens[index] = num_tokens
        self._call.finish_reasons.extend(item.finish_reason or "abort" for item in output.outputs)
        return output

    async def _stream_and_write(self, index: int) -> None:
        if last := await self._stream_one(index):
            await self._exchange.write(last)

    async def _stream_one(self, index: int) -> bytes:
        """Write the events of a prompt. Return the last events, which are not written yet."""
        call = self._call
        events = EventWriter(self._llm, self._exchange, call, index)
        stream = self._llm.generate_to(events, **self._request(index))
        async with aclosing(stream) as outputs:
            async for output in outputs:
                if output.finished:
                    raise_failure(output, self._call.sampling.names)
                data = await events.encode(output)
                if output.finished:
                    call.outputs[index] = output
                    call.usage.add_prompt(output)
                    break
                if data:
                    await self._exchange.write(data)
        call.usage.num_completion_tokens += events.num_tokens
        call.num_tokens[index] = events.num_tokens
        return data

    # --- complete choices ---------------------------------------------------------------------

    async def _choices(self, output: RequestOutput, first: int) -> list[dict[str, Any]]:
        call = self._call
        completions = output.outputs
        if len(completions) > call.sampling.num_returned:
            completions = sorted(completions, key=_mean_logprob, reverse=True)[
                : call.sampling.num_returned
            ]
        prompt_text = await _echoed(self._llm, call, output)
        choices = []
        for number, item in enumerate(completions):
            item = _shown(call, item)
            fields = await _choice_fields(call, output, item)
            text = prompt_text + item.text
            if (reader := _reader(call)) is not None:
                message = reader.message(item.text)
                fields["finish_reason"] = reader.finish_reason(item.finish_reason)
                choices.append({"index": first + number, "message": message, **fields})
            else:
                choices.append(call.form.choice(first + number, text, fields))
        return choices


class EventWriter:
    """Encodes the outputs of one prompt as events. num_tokens: generated tokens so far.

    As the sink of the request, it writes outputs that have only text.
    """

    def __init__(self, llm: AsyncLLM, exchange: Exchange, call: Call, index: int) -> None:
        self.num_tokens = 0
        self._llm = llm
        self._exchange = exchange
        self._call = call
        self._form = call.form
        self._first = index * call.sampling.num_returned
        no_fields = call.form.num_top is None and not call.with_ids
        self._plain = no_fields and call.reading is None
        self._sends_all = not no_fields
        self._readers: dict[int, ChoiceReader] = {}
        self._one_choice = call.sampling.params.n == 1 and not call.sampling.without_output
        self._offsets: dict[int, int] = {}

    def is_ready(self) -> bool:
        """Return whether the next output has only text, and can be written without waiting."""
        has_only_text = self._plain and self._one_choice and bool(self._offsets)
        return has_only_text and self._exchange.can_write_now

    def take(self, output: RequestOutput) -> None:
        """Write an output that has only text."""
        completion = output.outputs[0]
        self.num_tokens += len(completion.token_ids)
        if completion.text:
            self._exchange.write_now(self._form.event(self._first, completion.text))

    async def encode(self, output: RequestOutput) -> bytes:
        """Return the events for the new content of `output`."""
        parts = []
        for item in output.outputs:
            item = _shown(self._call, item)
            index = self._first + item.index
            self.num_tokens += len(item.token_ids)
            if item.index not in self._offsets:
                parts.append(await self._open(output, item))
            if self._plain and item.finish_reason is None:
                if item.text:
                    parts.append(self._form.event(index, item.text))
            else:
                parts.append(await self._full(item, index))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _open(self, output: RequestOutput, completion: CompletionOutput) -> bytes:
        """Return the events with which a choice starts."""
        call, index = self._call, self._first + completion.index
        self._offsets[completion.index] = 0
        if (reader := _reader(call)) is not None:
            self._readers[completion.index] = reader
        start = self._form.first_event(index, output)
        fields = await _prompt_fields(call, output)
        if not call.echo and not fields:
            return start
        text = await _echoed(self._llm, call, output)
        self._offsets[completion.index] = len(text)
        if call.echo and call.form.num_top is not None and output.prompt_logprobs is not None:
            block = self._form.logprobs()
            await add_all(block, output.prompt_token_ids, output.prompt_logprobs)
            fields["logprobs"] = block.body()
        return start + self._form.full_event(index, text, fields)

    async def _full(self, completion: CompletionOutput, index: int) -> bytes:
        call = self._call
        if completion.finish_reason is not None:
            call.finish_reasons.append(completion.finish_reason)
        fields: dict[str, Any] = {
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if (
            call.form.num_top is not None
            and completion.logprobs is not None
            and completion.token_ids
        ):
            block = self._form.logprobs(self._offsets[completion.index])
            await add_all(block, completion.token_ids, completion.logprobs)
            self._offsets[completion.index] = getattr(block, "offset", 0)
            fields["logprobs"] = block.body()
        if call.with_ids:
            fields["token_ids"] = completion.token_ids
        reader = self._readers.get(completion.index)
        if reader is None:
            return self._form.full_event(index, completion.text, fields)
        delta = reader.delta(completion.text, is_last=completion.finish_reason is not None)
        if not (delta or self._sends_all or completion.finish_reason is not None):
            return b""
        fields["finish_reason"] = reader.finish_reason(completion.finish_reason)
        return self._form.delta_event(index, delta, fields)


def _reader(call: Call) -> ChoiceReader | None:
    """Return the reader of a new choice, or None if its whole text is content."""
    parser = call.reading.parser() if call.reading is not None else None
    return None if call.reading is None or parser is None else ChoiceReader(call.reading, parser)


async def _echoed(llm: AsyncLLM, call: Call, output: RequestOutput) -> str:
    """Return the text that precedes the completions of a prompt, or "" without `echo`."""
    if not call.echo:
        return ""
    whole = call.sampling.params.truncate_prompt_tokens is None
    if llm.tokenizer is None or (whole and output.prompt is not None):
        return output.prompt or ""
    return await asyncio.to_thread(llm.tokenizer.decode, output.prompt_token_ids)


def _shown(call: Call, completion: CompletionOutput) -> CompletionOutput:
    """Return a completion as the client receives it."""
    if not call.sampling.without_output:
        return completion
    return replace(completion, text="", token_ids=[], logprobs=None)


async def _prompt_fields(call: Call, output: RequestOutput) -> dict[str, Any]:
    """Return the fields of a choice that describe its prompt."""
    fields: dict[str, Any] = {}
    params = call.sampling.params
    is_requested = params.prompt_logprobs is not None and not (
        call.echo and call.form.num_top is not None
    )
    if is_requested and output.prompt_logprobs is not None:
        fields["prompt_logprobs"] = await prompt_logprobs_body(
            output.prompt_logprobs, call.form.texts
        )
    if call.with_ids:
        fields["prompt_token_ids"] = output.prompt_token_ids
    return fields


async def _choice_fields(
    call: Call, output: RequestOutput, completion: CompletionOutput
) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "logprobs": None,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if call.form.num_top is not None:
        block = call.form.logprobs()
        if call.echo and output.prompt_logprobs is not None:
            await add_all(block, output.prompt_token_ids, output.prompt_logprobs)
        await add_all(block, completion.token_ids, completion.logprobs or ())
        fields["logprobs"] = block.body()
    if call.with_ids:
        fields["token_ids"] = completion.token_ids
    return fields


def _mean_logprob(completion: CompletionOutput) -> float:
    if completion.cumulative_logprob is None or not completion.token_ids:
        return LOWEST
    return completion.cumulative_logprob / len(completion.token_ids)


def raise_failure(output: RequestOutput | PoolingRequestOutput, names: Mapping[str, str]) -> None:
    """Raise APIError if a request was aborted or failed in the engine.

    names: the fields of the request by parameter.
    """
    if isinstance(output, PoolingRequestOutput):
        reasons = {output.finish_reason}
    else:
        reasons = {item.finish_reason for item in output.outputs}
    why = output.error or ""
    first_word = why.partition(" ")[0].partition("=")[0].rstrip(":")
    if "error" in reasons or (output.error is not None and not reasons):
        if why.startswith(("EngineDeadError", "UnavailableError")):
            raise unavailable(
                "The engine failed while it served this request. Try again later.",
                code="engine_failed",
            )
        param = names.get(first_word, first_word if first_word in COPIED else None)
        if param is not None:
            why = param + why.removeprefix(first_word)
        raise APIError(why, code="request_failed", param=param)
    if "abort" in reasons:
        if not why:
            raise unavailable("The request was aborted by the operator.", code="aborted")
        header = FIRST_TOKEN_HEADER if "deadline_s" in why else TIMEOUT_HEADER
        raise APIError(why, status=408, code="timeout", param=header)


async def all_of(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Await all tasks. At the first error, cancel the other tasks, then raise the error."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    if len(tasks) == 1:
        return [await tasks[0]]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
