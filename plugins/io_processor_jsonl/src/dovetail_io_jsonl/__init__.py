"""Batches of requests as JSON lines: one object for each request and for each output.

    llm = LLM(model, io_processor="jsonl")
    rows = llm.process(Path("questions.jsonl"))
    write_rows(Path("answers.jsonl"), rows)

This module depends on the format of JSON lines and of prompts, but not on an engine.
"""

from dovetail_io_jsonl.processor import JSONLProcessor
from dovetail_io_jsonl.rows import read_rows, write_rows

__all__ = ["JSONLProcessor", "read_rows", "write_rows"]
