"""Converts a conversation to token ids.

The chat template is rendered in the sandbox of the tokenizer. Text of special tokens inside a
message is encoded as plain text: before rendering, a mark is inserted into it, and the rendered
text is split at the marks, so that no piece contains the whole text of a special token.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from dovetail.engine.async_llm import AsyncLLM
from dovetail.engine.messages import conversation
from dovetail.engine.messages.conversation import MessageFieldError
from dovetail.engine.messages.history import CallForm, call_form, has_calls, prepare_history
from dovetail.errors import RequestError
from dovetail.interfaces import Tokenizer
from dovetail.value_checks import check_encodable
from dovetail_server.protocol.errors import APIError
from dovetail_server.protocol.fields import ChatRequest
from dovetail_server.protocol.messages import read_use, tool_variables

RESERVED_VARIABLES = frozenset(
    {
        "self",
        "messages",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
    }
)
"""Names that `chat_template_kwargs` must not have: arguments of `Tokenizer.apply_chat_template`."""

_MARKS = range(0xF0000, 0xF0100)
"""Private-use characters; one that the messages do not contain marks the split points."""


def chat_prompt(llm: AsyncLLM, request: ChatRequest) -> tuple[list[int], str]:
    """Return the token ids and the text of a conversation. Raise APIError or RequestError.

    Blocks while the template is rendered, so call it in a thread.
    """
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise APIError("This server has no tokenizer; send token ids to /v1/completions.")
    templates = tokenizer.chat_templates.values()
    if request.chat_template is not None:
        templates = [request.chat_template]
    messages = read_messages(request.messages, llm.config.limits.max_chat_messages, templates)
    try:
        form = call_form(tokenizer, request.chat_template) if has_calls(messages) else CallForm()
        text, mark = render(tokenizer, request, prepare_history(messages, form))
    except RecursionError:
        raise APIError("messages is nested too deeply.", param="messages") from None
    return encode_marked(tokenizer, text, mark), text.replace(mark, "") if mark else text


def fit_messages(llm: AsyncLLM, request: ChatRequest) -> ChatRequest:
    """Return the request without its oldest messages, so that its prompt is short enough.

    Instructions at the start stay, and the conversation then starts with a message of the user.
    Blocks while the template is rendered a few times, so call it in a thread.
    """
    limit = llm.max_model_len - max(request.max_completion_tokens or 1, 1)
    max_messages = llm.config.limits.max_chat_messages
    messages = request.messages
    first = next(
        (i for i, item in enumerate(messages) if item.get("role") not in ("system", "developer")),
        len(messages),
    )
    starts = [i for i in range(first + 1, len(messages)) if messages[i].get("role") == "user"]

    def shorter(start: int) -> ChatRequest:
        kept = [*messages[:first], *messages[start:]]
        return msgspec.structs.replace(request, messages=kept)

    def is_short(candidate: ChatRequest) -> bool:
        if len(candidate.messages) > max_messages:
            return False
        return len(chat_prompt(llm, candidate)[0]) <= limit

    if is_short(request) or not starts:
        return request
    index = bisect_left(starts, True, key=lambda start: is_short(shorter(start)))
    return shorter(starts[min(index, len(starts) - 1)])


def read_messages(
    items: Sequence[Mapping[str, Any]], maximum: int, templates: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Return messages whose content is a string or None. Raise APIError for an invalid entry.

    templates: the chat templates, which may name further roles than those of OpenAI.
    """
    if not items:
        raise APIError("messages is empty; send at least one message.", param="messages")
    if len(items) > maximum:
        raise APIError(
            f"messages has {len(items)} entries; at most {maximum} are accepted.", param="messages"
        )
    try:
        return conversation.read_messages(items, templates)
    except MessageFieldError as error:
        raise APIError(str(error), code=error.problem.value, param=error.parameter) from None


def render(
    tokenizer: Tokenizer, request: ChatRequest, messages: list[dict[str, Any]]
) -> tuple[str, str]:
    """Return the rendered conversation, and the marker inserted into special tokens of messages.

    The marker is "" if no message contains the text of a special token.
    """
    variables = _variables(request)
    goes_on = bool(request.continue_final_message)
    adds_prompt = request.add_generation_prompt
    if goes_on and adds_prompt:
        raise APIError(
            "continue_final_message and add_generation_prompt cannot both be true.",
            code="contradictory_parameters",
            param="continue_final_message",
        )
    final = _final_text(messages) if goes_on else ""
    find = special_texts(tokenizer)
    mark = ""
    if find is not None and _contains(find, [messages, variables]):
        mark = _unused_mark([messages, variables])
        messages = _marked(find, mark, messages)
        variables = _marked(find, mark, variables)
        final = _marked(find, mark, final)
    text = tokenizer.apply_chat_template(
        messages,
        chat_template=request.chat_template,
        add_generation_prompt=not goes_on if adds_prompt is None else adds_prompt,
        **variables,
    )
    return (_cut_after(text, final) if goes_on else text), mark


def encode_marked(tokenizer: Tokenizer, text: str, mark: str) -> list[int]:
    """Return the token ids of a rendered conversation, in which `mark` splits strings.

    Raises RequestError, parameter "messages", for lone surrogates.
    """
    pieces = text.split(mark) if mark else [text]
    check_encodable("messages", text)  # the arguments of a tool call can contain "\\ud800"
    return [
        token
        for piece in pieces
        if piece
        for token in tokenizer.encode(piece, add_special_tokens=False)
    ]


@lru_cache(maxsize=1)  # a server has one tokenizer
def special_texts(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return a pattern that matches the strings of special tokens, or None if there are none."""
    texts = {tokenizer.decode([token]) for token in tokenizer.special_token_ids}
    texts = {text for text in texts if len(text) > 1 and "\ufffd" not in text}
    if not texts:
        return None
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))


def _variables(request: ChatRequest) -> dict[str, Any]:
    variables = request.chat_template_kwargs or {}
    own = tool_variables(request, read_use(request))
    for name in variables:
        if name in own:
            raise APIError(
                f"chat_template_kwargs and the request both set {name}.",
                code="contradictory_parameters",
                param="chat_template_kwargs",
            )
        if name in RESERVED_VARIABLES or not name.isidentifier():
            raise APIError(
                f"chat_template_kwargs has the key {name[:40]!r}, which is not the name of an "
                "additional template variable.",
                param="chat_template_kwargs",
            )
    return {**variables, **own}


def _final_text(messages: Sequence[Mapping[str, Any]]) -> str:
    final = messages[-1].get("content")
    if not isinstance(final, str) or not final.strip():
        raise APIError(
            "continue_final_message needs a last message with text.",
            param="continue_final_message",
        )
    return final


def _cut_after(text: str, final: str) -> str:
    """Return `text` up to the end of the final message, as transformers does."""
    index = text.rfind(final.strip())
    if index < 0:
        raise RequestError(
            "The chat template changes the last message, so this message cannot be continued.",
            parameter="continue_final_message",
        )
    end = index + len(final.strip())
    # A template that keeps the spaces around a text also keeps them here.
    rest = final[len(final.rstrip()) :]
    return text[:end] + (rest if text[end:].startswith(rest) else "")


def _contains(find: re.Pattern[str], value: Any) -> bool:
    return any(find.search(text) for text in _texts(value))


def _unused_mark(value: Any) -> str:
    used = {char for text in _texts(value) for char in text if ord(char) >= _MARKS.start}
    for code in _MARKS:
        if chr(code) not in used:
            return chr(code)
    raise APIError(
        "The messages contain too many private-use Unicode characters.", param="messages"
    )


def _texts(value: Any) -> list[str]:
    strings, waiting = [], [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            strings.append(item)
        elif isinstance(item, list):
            waiting.extend(item)
        elif isinstance(item, dict):
            waiting.extend(item)
            waiting.extend(item.values())
    return strings


def _marked(find: re.Pattern[str], mark: str, value: Any) -> Any:
    """Return a copy of `value` with marks inside the strings of special tokens."""
    if isinstance(value, str):
        return _split_text(find, mark, value)
    if isinstance(value, list):
        return [_marked(find, mark, item) for item in value]
    if isinstance(value, dict):
        return {
            _split_text(find, mark, key): _marked(find, mark, item) for key, item in value.items()
        }
    return value


def _split_text(find: re.Pattern[str], mark: str, text: str) -> str:
    """Insert a mark after the first character of each special token, until none is left."""
    while True:
        text, count = find.subn(lambda pair: pair[0][0] + mark + pair[0][1:], text)
        if not count:
            return text
