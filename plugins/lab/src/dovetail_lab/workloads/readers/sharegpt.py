"""Reads conversations in the format of ShareGPT.

Format: a JSON list, or JSON Lines, of {"id": …, "conversations": [{"from": "human", "value": …},
{"from": "gpt", "value": …}, …]}. Each reply becomes one row. The prompt of a row consists of all
earlier messages, so the prompts of a conversation share prefixes. The format has no times: the
n-th conversation starts at n seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dovetail_lab.workloads.readers.lines import MAX_LINE_BYTES, read_lines
from dovetail_lab.workloads.readers.trace_row import NS, RowChecker, TraceError, TraceRow

CHARACTERS_PER_TOKEN = 4
TokenCounter = Callable[[str], int]
"""Returns the number of tokens in a text."""
_USERS = frozenset({"human", "user"})
_MODELS = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard", "model"})


def count_characters(text: str) -> int:
    """Return a rough number of tokens: one per four characters, rounded up."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def load_counter(directory: Path) -> TokenCounter:
    """Return a counter that uses the tokenizer of a model directory."""
    # Imported here, because it takes longer than reading a small file.
    from dovetail.tokenizers.huggingface import HuggingFaceTokenizer

    tokenizer = HuggingFaceTokenizer.from_directory(directory)
    return lambda text: len(tokenizer.encode(text))


def read_sharegpt(path: Path, count: TokenCounter = count_characters) -> Iterator[TraceRow]:
    """Yield one row per reply.

    Conversations without a reply are skipped. Raises TraceError for invalid JSON or a conversation
    with wrong types.
    """
    checker = RowChecker(str(path))
    for number, (line, conversation) in enumerate(_objects(path)):
        name = str(conversation.get("id", number))
        yield from _turns(checker, line, conversation, f"{name}#{number}", number * NS, count)


def _turns(
    checker: RowChecker,
    line: int,
    conversation: Mapping[str, Any],
    session: str,
    start_ns: int,
    count: TokenCounter,
) -> Iterator[TraceRow]:
    messages = conversation.get("conversations", conversation.get("messages"))
    if not isinstance(messages, list):
        checker.fail(line, 'the object has no list "conversations".')
    num_prompt = turn = 0
    for message in messages:
        role, text = _message(checker, line, message)
        length = count(text) if text else 0
        if role in _MODELS and num_prompt and length:
            yield TraceRow(
                line=line,
                arrival_ns=start_ns,
                num_prompt_tokens=checker.count(line, "the prompt's length", num_prompt),
                num_output_tokens=checker.count(line, "the reply's length", length),
                session=session,
                turn=turn,
            )
            turn += 1
        num_prompt += length


def _message(checker: RowChecker, line: int, message: object) -> tuple[str, str]:
    if not isinstance(message, dict):
        checker.fail(line, "a message is not an object.")
    role = message.get("from", message.get("role"))
    text = message.get("value", message.get("content"))
    if not isinstance(role, str) or not isinstance(text, str):
        checker.fail(line, 'a message has no strings "from" and "value".')
    if role not in _USERS | _MODELS and role not in ("system", "tool", "function"):
        checker.fail(line, f"the role {role[:40]!r} is not known.")
    return role, text


def _objects(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (line number of its end, object) from a JSON list or JSON Lines, one at a time."""
    decoder, buffer, is_list = json.JSONDecoder(), "", False
    line = 0
    for line, text in read_lines(path):
        buffer += text + "\n"
        if not is_list and buffer.lstrip().startswith("["):
            is_list, buffer = True, buffer.lstrip()[1:]
        while buffer := buffer.lstrip(" \t\r\n,"):
            if is_list and buffer.startswith("]"):
                return
            try:
                value, end = decoder.raw_decode(buffer)
            except RecursionError as error:
                raise TraceError(str(path), line, "the JSON is nested too deeply.") from error
            except ValueError:
                break  # the object continues in the next line
            if not isinstance(value, dict):
                kind = type(value).__name__
                raise TraceError(str(path), line, f"expected a conversation object, got {kind}.")
            buffer = buffer[end:]
            yield line, value
        if len(buffer) > MAX_LINE_BYTES:
            raise TraceError(str(path), line, "the text up to this line is not a JSON object.")
    if buffer or is_list:
        raise TraceError(str(path), line, "the JSON ends in the middle of a value.")
