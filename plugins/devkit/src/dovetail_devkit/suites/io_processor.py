"""The conformance suite of the IO processor contract, for any processor.

This module needs no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dovetail.errors import RequestError
from dovetail.interfaces.io_processor import (
    IOBatch,
    IOProcessor,
    IOProcessorContext,
    IOPrompt,
    IORequest,
    IOResult,
)
from dovetail.outputs import CompletionOutput, RequestMetrics, RequestOutput
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.contexts import make_config, write_fake_config
from dovetail_devkit.expectation import checking, expect, expect_error
from dovetail_devkit.fakes.tokenizer import ByteTokenizer


@checking("io_processor")
def check_io_processor(
    processor_cls: type[IOProcessor], *, options: Mapping[str, object] | None = None
) -> None:
    """Check a processor with its `example_data`. Raise AssertionError with the violated rule.

    options: constructor options; None for none.
    """
    with TemporaryDirectory() as folder:
        config = make_config(write_fake_config(Path(folder)))
        context = IOProcessorContext(
            model=config.model,
            limits=config.limits,
            tokenizer=ByteTokenizer(),
            default_sampling=SamplingParams(),
            options=options or {},
        )
        processor = processor_cls(context)
        _check_prompts(processor)
        _check_results(processor)
        rule = "pre_process must raise RequestError for invalid data"
        unfit = IORequest(data=object())
        expect_error(RequestError, lambda: processor.pre_process(unfit), rule)


def make_outputs(batch: IOBatch, *, failing: int = -1) -> list[RequestOutput]:
    """Return one output per prompt, with the strings "answer 0", "answer 1" and so on.

    failing: index of a prompt whose output is an error; -1 for none.
    """
    return [
        RequestOutput(
            request_id=str(index),
            prompt=None,
            prompt_token_ids=[1],
            outputs=[] if index == failing else [_completion(index)],
            finished=True,
            metrics=RequestMetrics(arrival_ns=0),
            error="requested failure" if index == failing else None,
        )
        for index in range(len(batch.prompts))
    ]


def _completion(index: int) -> CompletionOutput:
    text = f"answer {index}"
    return CompletionOutput(index=0, text=text, token_ids=[1, 2], finish_reason="stop")


def _example(processor: IOProcessor) -> IORequest:
    params = SamplingParams(max_tokens=3)
    return IORequest(data=deepcopy(processor.example_data), sampling_params=params)


def _check_prompts(processor: IOProcessor) -> None:
    request = _example(processor)
    batch = processor.pre_process(request)
    expect(isinstance(batch, IOBatch), f"pre_process returns {batch!r:.100}; expected an IOBatch")
    expect(bool(batch.prompts), "pre_process must return at least one prompt for example_data")
    for index, prompt in enumerate(batch.prompts):
        expect(
            isinstance(prompt, IOPrompt),
            f"pre_process returns {prompt!r:.100} as prompt {index}; expected an IOPrompt",
        )
        params = prompt.sampling_params
        valid = params is None or isinstance(params, SamplingParams)
        expect(
            valid,
            f"prompt {index} has sampling_params={params!r:.100}; expected SamplingParams or None",
        )
    expect(request.data == processor.example_data, "pre_process must not change the data")
    again = processor.pre_process(_example(processor))
    expect(
        again.prompts == batch.prompts,
        "two calls of pre_process with the same data must return the same prompts",
    )


def _check_results(processor: IOProcessor) -> None:
    """Check that results do not depend on earlier calls, and that outputs are not changed."""

    def result(batch: IOBatch, failing: int) -> IOResult:
        outputs = make_outputs(batch, failing=failing)
        return IOResult(request=_example(processor), batch=batch, outputs=outputs)

    def finish(result: IOResult) -> Any:
        before = deepcopy(result.outputs)
        processed = processor.post_process(result)
        expect(result.outputs == before, "post_process must not change the outputs")
        return processed

    first, second = (processor.pre_process(_example(processor)) for _ in range(2))
    bad, valid = finish(result(second, 0)), finish(result(first, -1))
    alone = finish(result(processor.pre_process(_example(processor)), -1))
    expect(valid == alone, "the result of post_process must not depend on earlier calls")
    expect(bad != valid, "post_process must return another result if a prompt has failed")
