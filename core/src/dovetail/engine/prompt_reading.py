"""Reads the forms that a prompt may have. Knows no tokenizer: text stays text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.errors import RequestError, nearest
from dovetail.inputs import Prompt

_CONTENTS = ("prompt_token_ids", "prompt")
_TRAITS = ("cache_salt", "tenant", "deadline_s")
_MAX_DEADLINE_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPrompt:
    """A prompt, whatever its form was. content: its text or its token ids, not yet checked.

    The others are those of `dovetail.inputs.PromptTraits`; deadline_s is None for no deadline.
    """

    content: str | Sequence[int]
    cache_salt: str = ""
    tenant: str = ""
    deadline_s: float | None = None

    def deadline_ns(self, now_ns: int) -> int:
        """Return when its first token is due, on a clock that shows `now_ns`; 0 for never."""
        return 0 if self.deadline_s is None else max(1, now_ns + round(self.deadline_s * 1e9))


def read_prompt(prompt: Prompt) -> ReadPrompt:
    """Return what `prompt` says; raise RequestError, naming the key at fault."""
    if not isinstance(prompt, Mapping):
        return ReadPrompt(content=_content(prompt))
    known = (*_CONTENTS, *_TRAITS)
    if unknown := sorted(str(key) for key in prompt if key not in known):
        raise RequestError(
            f'the prompt has {unknown[0]!r}, which is not known; it may have "prompt" or '
            f'"prompt_token_ids", and {", ".join(_TRAITS)}.' + nearest(unknown[0], known),
            parameter="prompt",
        )
    told: Mapping[str, Any] = prompt
    traits = {name: told[name] for name in _TRAITS if name in told}
    for name in ("cache_salt", "tenant"):
        if not isinstance(traits.get(name, ""), str):
            raise RequestError(f"{name}={traits[name]!r} must be a string.", parameter=name)
    due = traits.get("deadline_s")
    is_number = isinstance(due, int | float) and not isinstance(due, bool)
    if due is not None and not (is_number and 0 < due < _MAX_DEADLINE_S):
        raise RequestError(
            f"deadline_s={due!r} must be a positive number of seconds from now.",
            parameter="deadline_s",
        )
    content = told.get("prompt_token_ids", told.get("prompt"))
    return ReadPrompt(content=_content(content), **traits)


def prompt_text(prompt: Prompt) -> str | None:
    """Return the prompt's text, or None if it was given as token ids."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def _content(given: object) -> str | Sequence[int]:
    if isinstance(given, Sequence) and not isinstance(given, bytes | bytearray):
        return given
    raise RequestError(
        f"the prompt is a {type(given).__name__}; give a string, a list of token ids, "
        '{"prompt": "…"} or {"prompt_token_ids": […]}.',
        parameter="prompt",
    )
