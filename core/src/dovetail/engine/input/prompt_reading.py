"""Reads the forms that a prompt may have. This module does not tokenize."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any

from dovetail.errors import RequestError, nearest
from dovetail.inputs import Prompt
from dovetail.interfaces.requested_config import LimitsConfig
from dovetail.value_checks import (
    check_number,
    check_text,
    guarded,
    invalid,
    plain_text,
    shorten,
)

_CONTENTS = ("prompt_token_ids", "prompt")
_TRAITS = ("cache_salt", "tenant", "deadline_s")
_SYNONYMS = {"content": "prompt", "text": "prompt", "token_ids": "prompt_token_ids"}
_MAX_DEADLINE_S = 1e9
_NOT_TOKENS = (bytes, bytearray, memoryview, Mapping, Set)
DEFAULT_LIMITS = LimitsConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPrompt:
    """A prompt in a uniform form. content: the text or the token ids, not yet checked.

    text: the prompt's text, or None if the prompt has only token ids. cache_salt, tenant,
    deadline_s: as in `dovetail.inputs.PromptTraits`; deadline_s is None for no deadline.
    """

    content: str | Iterable[int]
    text: str | None = None
    cache_salt: str = ""
    tenant: str = ""
    deadline_s: float | None = None

    def deadline_ns(self, now_ns: int) -> int:
        """Return the deadline of the first token, on the same clock as `now_ns`, or 0 for none."""
        return 0 if self.deadline_s is None else max(1, now_ns + round(self.deadline_s * 1e9))


def read_prompt(prompt: Prompt, limits: LimitsConfig = DEFAULT_LIMITS) -> ReadPrompt:
    """Return the parts of `prompt`. Raise RequestError that names the invalid key.

    Checks the sizes of salt and tenant, but not of the text and the token ids.
    """
    if not isinstance(prompt, Mapping):
        content = _content(prompt)
        return ReadPrompt(content=content, text=content if isinstance(content, str) else None)
    entries = _known_entries(prompt)
    traits: dict[str, Any] = {
        name: check_text(name, entries[name], max_chars=limits.max_id_chars, limit="max_id_chars")
        for name in ("cache_salt", "tenant")
        if name in entries
    }
    due = entries.get("deadline_s")
    if due is not None:
        due = check_number("deadline_s", due, 0.0, _MAX_DEADLINE_S, open_low=True)
    text, ids = entries.get("prompt"), entries.get("prompt_token_ids")
    if ids is not None and text is not None and not isinstance(text, str):
        raise invalid("prompt", text, "a string if prompt_token_ids is also given")
    if isinstance(ids, str):
        raise invalid("prompt_token_ids", ids, 'an iterable of token ids; pass a text as "prompt"')
    content = _content(text if ids is None else ids)
    own = _content(text) if isinstance(text, str) else None
    return ReadPrompt(
        content=content,
        text=own if isinstance(own, str) else None,
        deadline_s=due,
        **traits,
    )


def take_token_ids(
    iterable: Iterable[int], *, keep_last: int | None, max_model_len: int, num_outputs: int = 1
) -> tuple[int, ...]:
    """Return unchecked token ids. Read at most `max_model_len` + 1 of them.

    keep_last: return only this many ids from the end; None for all. num_outputs: output tokens for
    which `max_model_len` must leave room. Raises RequestError for a prompt that is too long, before
    its other ids are read, and for an iterable that fails.
    """
    longest = max_model_len - num_outputs
    if keep_last is not None and isinstance(iterable, Sequence):
        sequence = iterable
        iterable = guarded("prompt", lambda: _last_of(sequence, keep_last))
    known_length = type(iterable) in (list, tuple, range)
    count = len(iterable) if known_length else None  # type: ignore[arg-type]  # these have a length
    if count is None or count <= longest:
        token_ids = guarded("prompt", lambda: tuple(islice(iterable, longest + 1)))
        if len(token_ids) <= longest:
            return token_ids if keep_last is None else token_ids[-keep_last:]
        count = None
    shown = f"more than {longest}" if count is None else count
    room = " must leave room for one output token" if num_outputs else ""
    remedy = "set" if known_length else "pass a list and set"
    raise RequestError(
        f"the prompt has {shown} tokens, but at most {longest} fit: max_model_len="
        f"{max_model_len}{room}. Shorten the prompt, or {remedy} "
        f"truncate_prompt_tokens={longest}.",
        parameter="prompt",
    )


def cut_before_end(
    token_ids: tuple[int, ...], limit: int, special: frozenset[int]
) -> tuple[int, ...]:
    """Return at most `limit` ids: the first ones, and the special tokens at the end."""
    num_end = 0
    while num_end < len(token_ids) and token_ids[-1 - num_end] in special:
        num_end += 1
    if len(token_ids) <= limit or num_end >= limit:
        return token_ids[:limit]
    return token_ids[: limit - num_end] + token_ids[len(token_ids) - num_end :]


def _known_entries(prompt: Mapping[str, Any]) -> dict[str, Any]:
    known = (*_CONTENTS, *_TRAITS)
    entries = guarded("prompt", lambda: dict(islice(prompt.items(), len(known) + 1)))
    # Only plain strings are accepted as keys: looking up a subclass of str calls its own methods.
    for name in entries:
        if type(name) is not str or name not in known:
            raise RequestError(
                f'the prompt has the unknown key {shorten(name)}; use "prompt" or '
                f'"prompt_token_ids", and {", ".join(_TRAITS)}.{_nearest(name, known)}',
                parameter="prompt",
            )
    return entries


def _nearest(name: object, known: tuple[str, ...]) -> str:
    if type(name) is not str:
        return ""
    return f" Did you mean {_SYNONYMS[name]!r}?" if name in _SYNONYMS else nearest(name[:80], known)


def _last_of(sequence: Sequence[int], count: int) -> Iterable[int]:
    # A deque cannot be sliced.
    return deque(sequence, maxlen=count) if isinstance(sequence, deque) else sequence[-count:]


def _content(prompt: object) -> str | Iterable[int]:
    if isinstance(prompt, str):
        return plain_text(prompt)
    if isinstance(prompt, Iterable) and not isinstance(prompt, _NOT_TOKENS):
        return prompt
    raise RequestError(
        f"the prompt has the type {type(prompt).__name__}; pass a string, a list of token ids, "
        '{"prompt": "…"} or {"prompt_token_ids": […]}.',
        parameter="prompt",
    )
