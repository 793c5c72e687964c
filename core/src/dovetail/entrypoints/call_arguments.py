"""Reads the arguments of `LLM`: one or several prompts, one value for all or for each prompt.

An iterable is read only as far as the engine's limits allow. Items that are not prompts are passed
on; a later check rejects them, with their index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from dovetail.errors import RequestError
from dovetail.value_checks import guarded, invalid, plain_copy, shorten, take_items

if TYPE_CHECKING:
    from dovetail.interfaces.requested_config import LimitsConfig

_ONE_PROMPT = (str, bytes, bytearray, memoryview, Mapping, set, frozenset, range)
_TEMPLATE_PARAMETERS = ("self", "messages", "chat_template", "add_generation_prompt")
_MAX_KWARGS_BYTES = 2**20
_BYTES_PER_CHAR = 8
"""Maximum bytes of a conversation for each character of the longest allowed prompt."""


def list_prompts(prompts: Any, *, limits: LimitsConfig, max_model_len: int) -> list[Any]:
    """Return the prompts as a list: a string, a mapping or some token ids are one prompt.

    Raises RequestError for more than `limits.max_prompts`, and for an iterable that fails.
    """
    if isinstance(prompts, _ONE_PROMPT) or not isinstance(prompts, Iterable):
        return [prompts]
    if (
        isinstance(prompts, (list, tuple))
        and _begins_with_token(prompts)
        and all(map(_is_token, prompts[: max_model_len + 1]))
    ):
        return [list(prompts) if len(prompts) <= max_model_len else prompts]
    items: Iterator[Any] = guarded("prompts", lambda: iter(prompts))
    head = guarded("prompts", lambda: list(islice(items, 1)))
    if not head:
        return []
    if _is_token(head[0]):
        # One token more than the limit shows that the prompt is too long.
        head += guarded("prompts", lambda: list(islice(items, max_model_len)))
        if all(map(_is_token, head)):
            return [head]
    return take_items(
        "prompts", chain(head, items), limits.max_prompts, what="prompts", limit="max_prompts"
    )


def one_each(value: Any, count: int, name: str) -> list[Any]:
    """Return `count` values: the elements of a list or tuple, or one value repeated."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    items: list[Any] = guarded(name, lambda: list(islice(value, count + 1)))
    if len(items) != count:
        # Only the length of a built-in type is trusted.
        num_items: object = len(items) if len(items) < count else f"more than {count}"
        if type(value) in (list, tuple):
            num_items = len(value)
        prompts = "1 prompt" if count == 1 else f"{count} prompts"
        raise RequestError(
            f"{num_items} {name} were given for {prompts}; pass one, or one for each prompt.",
            parameter=name,
        )
    return items


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise RequestError unless `value` is one of `choices`, of the same type."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise invalid(name, value, " or ".join(map(repr, choices)))


def list_conversations(messages: Any, limits: LimitsConfig) -> dict[str, Any]:
    """Return one or several conversations by their names. Raise RequestError for too many.

    The conversations are not checked yet. A name, such as "messages[1]", is used in errors.
    """
    items = _items("messages", messages, max(limits.max_prompts, limits.max_chat_messages))
    if not items or isinstance(items[0], Mapping):
        return {"messages": items}
    return {f"messages[{index}]": item for index, item in enumerate(items)}


def check_template_arguments(
    chat_template: object, kwargs: object, add_generation_prompt: object
) -> dict[str, Any]:
    """Return the template's variables as plain data. Raise RequestError for an invalid one."""
    if chat_template is not None and not isinstance(chat_template, str):
        raise invalid("chat_template", chat_template, "None or a string")
    check_choice("add_generation_prompt", add_generation_prompt, (True, False))
    if kwargs is None:
        return {}
    name = "chat_template_kwargs"
    if not isinstance(kwargs, Mapping):
        raise invalid(name, kwargs, "None, or a mapping from names to values")
    copied: dict[str, Any] = plain_copy(name, kwargs, max_bytes=_MAX_KWARGS_BYTES)
    for key in copied:
        if not isinstance(key, str) or key in _TEMPLATE_PARAMETERS:
            raise RequestError(
                f"{name} has the key {shorten(key)}; use names of template variables, but not "
                f"{', '.join(_TEMPLATE_PARAMETERS)}.",
                parameter=name,
            )
    return copied


def read_conversation(
    name: str,
    conversation: Any,
    templates: Iterable[str],
    *,
    limits: LimitsConfig,
    max_prompt_chars: int,
) -> list[dict[str, Any]]:
    """Return a conversation as messages of plain data. Raise RequestError if it is invalid.

    name: the conversation's name in errors. templates: see `read_messages`.
    """
    from dovetail.engine.messages.conversation import read_messages  # imported with the engine

    messages = _items(name, conversation, limits.max_chat_messages, limit="max_chat_messages")
    if not messages:
        raise RequestError(f"{name} is empty; pass at least one message.", parameter=name)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise invalid(f"{name}[{index}]", message, 'a mapping with "role" and "content"')
    copied: list[dict[str, Any]] = plain_copy(
        name,
        messages,
        max_bytes=max_prompt_chars * _BYTES_PER_CHAR,
        limit="max_prompt_chars",
    )
    return read_messages(copied, templates, name=name)


def _items(name: str, messages: Any, max_items: int, limit: str = "") -> list[Any]:
    if isinstance(messages, _ONE_PROMPT) or not isinstance(messages, Iterable):
        expected = 'a mapping with "role" and "content", or a list of such mappings'
        if name == "messages":
            expected = "a list of messages, or a list of such lists"
        raise invalid(name, messages, expected)
    return take_items(name, messages, max_items, what="messages", limit=limit)


def _begins_with_token(prompts: Sequence[Any]) -> bool:
    return type(prompts) in (list, tuple) and bool(prompts) and _is_token(prompts[0])


def _is_token(item: object) -> bool:
    return isinstance(item, int)
