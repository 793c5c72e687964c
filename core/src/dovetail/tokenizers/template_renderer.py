"""Renders chat templates in a child process that is kept running and killed at a deadline.

The child limits the time, memory and output of every template. It starts at the first conversation
or earlier. Once it runs, it adds much less than a millisecond to a rendering. Renderers with the
same limits share their children. `render` may be called from any thread and blocks until the
response or the deadline, so an event loop must call it with `asyncio.to_thread`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

from dovetail.errors import RequestError
from dovetail.sandbox.child import ChildFailure, ChildLimits, ChildTask, HandlerError
from dovetail.sandbox.frames import encode
from dovetail.sandbox.pool import ChildPool
from dovetail.tokenizers.template_input import MAX_TEMPLATE_CHARS, check_messages, plain_value

DEFAULT_LIMITS = ChildLimits(timeout_s=2.0, memory_bytes=256 << 20)
_TASK = ChildTask(
    handler="dovetail.tokenizers.template_child:render", packages=("jinja2", "markupsafe")
)


class TemplateRenderer:
    """Renders chat templates within limits. Thread-safe.

    now: returns the local time, for templates that print the date.
    """

    def __init__(
        self,
        limits: ChildLimits = DEFAULT_LIMITS,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Create the renderer. Its child process starts at `start_child` or the first `render`."""
        self._pool = _pool(limits)
        self._now = now

    def start_child(self) -> None:
        """Start the child in the background, so that the first call does not wait for it."""
        self._pool.start_child()

    def render(
        self, template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        """Return the prompt for `messages`. variables: additional variables of the template.

        Raises RequestError with the parameter "messages" if `messages` is not a conversation or the
        template rejects it, fails or exceeds a limit; with the parameter "chat_template" if the
        template is not valid; with the name of a variable if that is not a JSON value. Raises
        StartError if no child can be started.
        """
        _check_template(template)
        check_messages(messages)
        request = {
            "template": template,
            "messages": plain_value(messages, "messages"),
            "variables": {name: plain_value(value, name) for name, value in variables.items()},
            "now": self._now().isoformat(),
        }
        try:
            text: str = self._pool.call(encode(request))
        except HandlerError as error:
            raise _request_error(error) from None
        except ChildFailure as failure:
            raise _not_rendered(str(failure)) from None
        return text


@cache
def _pool(limits: ChildLimits) -> ChildPool:
    return ChildPool(_TASK, limits)


def _check_template(template: object) -> None:
    if not isinstance(template, str):
        raise RequestError(
            f"chat_template must be a string, not {type(template).__name__}.",
            parameter="chat_template",
        )
    if len(template) > MAX_TEMPLATE_CHARS:
        raise RequestError(
            f"the chat template is not valid: it has {len(template)} characters; the limit is "
            f"{MAX_TEMPLATE_CHARS}.",
            parameter="chat_template",
        )


def _request_error(error: HandlerError) -> RequestError:
    if error.kind == RequestError.__name__:
        return RequestError(str(error), parameter=error.parameter)
    return _not_rendered(str(error) or error.kind)


def _not_rendered(reason: str) -> RequestError:
    return RequestError(
        f"the chat template could not render the conversation: {reason}. "
        "Change the messages, or use another chat_template.",
        parameter="messages",
    )
