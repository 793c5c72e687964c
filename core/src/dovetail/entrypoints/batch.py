"""A list of requests through an engine to the end, with a progress bar, results in order."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from dovetail.entrypoints.interrupts import watch_for_interrupt
from dovetail.errors import RequestError, UserError
from dovetail.outputs import RequestMetrics, RequestOutput, RequestOutputKind

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from dovetail.engine.llm_engine import LLMEngine
    from dovetail.inputs import Prompt
    from dovetail.sampling_params import SamplingParams

Asked = tuple[str, "Prompt", "SamplingParams | None", int]


def run_batch(
    engine: LLMEngine, requests: Sequence[Asked], *, use_tqdm: bool, on_error: str
) -> list[RequestOutput]:
    """Return one output a request (id, prompt, parameters, priority), in their order.

    on_error: "raise" ends all of them if one is refused; "return" puts the refusal in its output.
    Raises UserError if the engine is paused: nobody could resume it meanwhile.
    """
    if engine.paused:
        raise UserError(f"the engine is paused ({engine.paused}); call its resume() first.")
    results: dict[str, RequestOutput] = {}
    for place, (request_id, prompt, params, priority) in enumerate(requests):
        try:
            engine.add_request(
                request_id,
                prompt,
                params,
                priority=priority,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
        except RequestError as error:
            if on_error == "return":
                results[request_id] = _refused(request_id, prompt, error)
                continue
            _withdraw(engine, requests[:place])
            where = f"prompt {place}: " if len(requests) > 1 else ""
            raise RequestError(f"{where}{error}", parameter=error.parameter) from None
    try:
        _run(engine, len(requests), results, shown=use_tqdm and sys.stderr.isatty())
    except BaseException:
        _withdraw(engine, requests)
        raise
    return [results[request_id] for request_id, *_ in requests]


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
                rates = f"in {num_in / seconds:.0f}, out {num_out / seconds:.0f} tok/s"
                bar.update(task, completed=len(results), rates=rates)
            if interrupted():
                raise KeyboardInterrupt


def _progress(num_requests: int) -> tuple[Progress, TaskID]:
    from rich.console import Console  # only where somebody looks
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


def _withdraw(engine: LLMEngine, requests: Sequence[Asked]) -> None:
    """Leave the engine as it was: nothing of these requests stays behind."""
    ids = [request_id for request_id, *_ in requests]
    engine.abort_request(ids)
    engine.discard_ended(ids)


def _refused(request_id: str, prompt: Prompt, error: RequestError) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=[],
        outputs=[],
        finished=True,
        metrics=RequestMetrics(arrival_ns=0),
        error=str(error),
    )
