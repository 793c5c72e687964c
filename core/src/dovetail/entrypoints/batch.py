"""Runs a list of requests to completion, with a progress bar.

The results have the order of the requests.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from dovetail.entrypoints.interrupts import watch_for_interrupt
from dovetail.errors import RequestError, UserError
from dovetail.outputs import RequestMetrics, RequestOutput
from dovetail.value_checks import shorten

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from dovetail.engine.front_end import UserRequest
    from dovetail.engine.llm_engine import LLMEngine
    from dovetail.inputs import Prompt

SHOWN_PROMPT_CHARS = 4096
"""The output of a rejected prompt contains at most this many characters of the prompt."""


def run_batch(
    engine: LLMEngine,
    requests: Sequence[UserRequest],
    *,
    use_tqdm: bool,
    on_error: str,
    names: Sequence[str] = (),
) -> list[RequestOutput]:
    """Return one output per request, in order.

    on_error: if a request is rejected, "raise" aborts all requests; "return" puts the error in the
    output of the rejected request. names: the name of each prompt in errors; () for its index.
    Raises UserError if the engine is paused, because this call would never return.
    """
    if engine.paused:
        raise UserError(f"the engine is paused ({engine.paused}); call its resume() first.")
    rejected: Mapping[str, RequestError] = {}
    try:
        rejected = {
            request_id: error.with_name("sampling_params", replaced="params")
            for request_id, error in engine.add_requests(requests).items()
        }
        if names:
            rejected = {
                request.request_id: rejected[request.request_id].with_name(name)
                for request, name in zip(requests, names, strict=True)
                if request.request_id in rejected
            }
        if rejected and on_error == "raise":
            raise next(iter(rejected.values())) if names else _first_rejection(requests, rejected)
        results = {
            request.request_id: rejected_output(
                request.request_id, request.prompt, rejected[request.request_id]
            )
            for request in requests
            if request.request_id in rejected
        }
        _run(engine, len(requests), results, shown=use_tqdm and sys.stderr.isatty())
    except BaseException:
        # A rejected id may be in use by another caller's request, which continues.
        _abort(engine, [request for request in requests if request.request_id not in rejected])
        raise
    if missing := [request.request_id for request in requests if request.request_id not in results]:
        raise UserError(
            f"the outputs of {len(missing)} requests, including {shorten(missing[0])}, were taken "
            "by another caller of this engine's step(); do not call step() during LLM.generate."
        )
    return [results[request.request_id] for request in requests]


def _first_rejection(
    requests: Sequence[UserRequest], rejected: Mapping[str, RequestError]
) -> RequestError:
    position, error = next(
        (index, rejected[request.request_id])
        for index, request in enumerate(requests)
        if request.request_id in rejected
    )
    where = f"prompt {position}: " if len(requests) > 1 else ""
    return RequestError(f"{where}{error}", parameter=error.parameter)


def _run(
    engine: LLMEngine, num_requests: int, results: dict[str, RequestOutput], *, shown: bool
) -> None:
    bar, task = _progress(num_requests) if shown else (None, None)
    num_in = num_out = 0
    with bar or nullcontext(), watch_for_interrupt() as interrupted:
        while engine.has_unfinished_requests():
            finished = [output for output in engine.step() if output.finished]
            results |= {output.request_id: output for output in finished}
            num_in += sum(len(output.prompt_token_ids) for output in finished)
            num_out += sum(len(done.token_ids) for output in finished for done in output.outputs)
            if bar is not None and task is not None and finished:
                seconds = bar.tasks[task].elapsed or 1e-9
                rates = f"{num_in / seconds:.0f} input, {num_out / seconds:.0f} output tokens/s"
                bar.update(task, completed=len(results), rates=rates)
            if interrupted():
                raise KeyboardInterrupt


def _progress(num_requests: int) -> tuple[Progress, TaskID]:
    from rich.console import Console  # imported only if the bar is shown
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns: tuple[Any, ...] = (
        TextColumn("Answering"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[rates]}"),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=False)
    return bar, bar.add_task("Answering", total=num_requests, rates="")


def _abort(engine: LLMEngine, requests: Sequence[UserRequest]) -> None:
    """Abort these requests and discard their outputs."""
    ids = [request.request_id for request in requests]
    with watch_for_interrupt() as interrupted:
        engine.abort_request(ids)
        engine.discard_ended(ids)
    if interrupted():
        raise KeyboardInterrupt


def rejected_output(request_id: str, prompt: Prompt | None, error: RequestError) -> RequestOutput:
    """Return the output of a rejected request, without completions and with `error`."""
    return RequestOutput(
        request_id=request_id,
        prompt=prompt[:SHOWN_PROMPT_CHARS] if isinstance(prompt, str) else None,
        prompt_token_ids=[],
        outputs=[],
        finished=True,
        metrics=RequestMetrics(arrival_ns=0),
        error=str(error),
    )
