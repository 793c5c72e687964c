"""Renders chat templates in the bounded child of `dovetail.tokenizers.template_renderer`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from dovetail.tokenizers.chat_template import ChatTemplateEnvironment, render_chat_template

_now = datetime.min
_environment = ChatTemplateEnvironment(now=lambda: _now)


def render(request: Any, _blob: bytes) -> str:
    """Return the prompt for `template`, `messages`, `variables` and the local time `now`.

    Raises RequestError as `render_chat_template` and `compile_template` do.
    """
    global _now
    _now = datetime.fromisoformat(request["now"])
    template = _environment.compile_template(request["template"])
    return render_chat_template(template, request["messages"], request["variables"])
