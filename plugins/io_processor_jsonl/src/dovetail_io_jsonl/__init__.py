"""Batches of requests as JSON lines: one object a request in, one an answer out.

    llm = LLM(model, io_processor="jsonl")
    rows = llm.process(Path("questions.jsonl"))
    write_rows(Path("answers.jsonl"), rows)

Knows files of JSON lines and the forms of a prompt; nothing of engines.
"""

from dovetail_io_jsonl.processor import JSONLProcessor
from dovetail_io_jsonl.rows import read_rows, write_rows

__all__ = ["JSONLProcessor", "read_rows", "write_rows"]
