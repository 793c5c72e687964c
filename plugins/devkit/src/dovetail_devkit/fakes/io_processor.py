"""A fake IO processor that converts a list of strings to a list of outputs."""

from __future__ import annotations

from typing import Any, ClassVar

from dovetail.errors import RequestError
from dovetail.interfaces.io_processor import (
    IOBatch,
    IOProcessor,
    IOProcessorContext,
    IOPrompt,
    IORequest,
    IOResult,
)


class FakeIOProcessor(IOProcessor):
    """Returns (text, output) for each text. The output of a failed request is None."""

    example_data: ClassVar[Any] = ["say", "something"]

    def __init__(self, context: IOProcessorContext) -> None:
        self.options = context.options

    def pre_process(self, request: IORequest) -> IOBatch:
        """Return one prompt per text."""
        texts = request.data
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise RequestError(f"data={texts!r:.80} must be a list of strings.", parameter="data")
        return IOBatch(prompts=tuple(IOPrompt(prompt=text) for text in texts), state=len(texts))

    def post_process(self, result: IOResult) -> list[tuple[str, str | None]]:
        """Return each text with its output, which is None for a failed request."""
        return [
            (text, None if output.error else output.outputs[0].text)
            for text, output in zip(result.request.data, result.outputs, strict=True)
        ]
