"""Chat templates: convert conversations to prompts, in a sandbox with limits.

A template comes with a model or a request, so it is an untrusted program. It can only read its
variables. It is stopped if it exceeds a limit on the steps of loops and macros, the lengths of
strings or the sizes of numbers. These limits alone do not bound memory and time, so a template runs
in a bounded child process: use `dovetail.tokenizers.template_renderer`, which runs this module in
the child. This module uses no token
ids: `dovetail.tokenizers.huggingface` passes the strings of special tokens as variables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from dovetail.errors import RequestError
from dovetail.tokenizers.template_input import MAX_TEMPLATE_CHARS, check_messages

MAX_TEXT_CHARS = 1 << 20
"""Maximum characters of the prompt and of every intermediate string."""
MAX_STEPS = 200_000
"""Maximum loop iterations and macro calls in one rendering."""
MAX_NUMBER = 1_000_000
"""Largest integer argument of a function, such as a width or a count."""
MAX_PRODUCT = 1 << 26
"""Maximum product of the arguments' sizes, for functions that multiply them."""
MAX_CACHED = 32
STEPS_LEFT = "steps left"
"""Name of the step counter. It contains a space, so that templates cannot use it."""
MULTIPLIERS = frozenset({"replace", "join", "translate"})
WIDE_FIELD = re.compile(r"\d{5,}")


def render_chat_template(
    template: Template, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str:
    """Render `messages` with a `template` from `ChatTemplateEnvironment`.

    variables: additional variables of the template (add_generation_prompt, tools, bos_token, …).
    The arguments are not changed. Raises RequestError, parameter "messages", if `messages` is not a
    conversation or the template rejects it, fails or exceeds a limit.
    """
    check_messages(messages)
    context = {"tools": None, "documents": None, **variables}
    pieces: list[str] = []
    length = 0
    try:
        for piece in template.generate({**context, "messages": messages, STEPS_LEFT: [MAX_STEPS]}):
            length += len(piece)
            if length > MAX_TEXT_CHARS:
                _reject(f"the prompt is longer than {MAX_TEXT_CHARS} characters")
            pieces.append(piece)
    except Exception as error:  # an untrusted program may raise any exception
        raise RequestError(
            f"the chat template could not render the conversation: {_describe(error)}. "
            "Change the messages, or use another chat_template.",
            parameter="messages",
        ) from error
    return "".join(pieces)


def _describe(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "the template needs too much memory"
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 300 else text[:297] + "..."


def _reject(reason: str) -> NoReturn:
    raise TemplateError(reason)


class _Generation(Extension):
    """Ignore the tag `{% generation %}` and render its body. Only training tools use the tag."""

    tags = {"generation"}  # noqa: RUF012  # the base class's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Metering(NodeTransformer):
    """Adds code that counts the steps of loops and macros and checks the results of `~`."""

    def _with_step(self, node: nodes.For | nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        step = nodes.Call(
            nodes.EnvironmentAttribute("take_step"), [nodes.ContextReference()], [], None, None
        )
        node.body.insert(0, nodes.ExprStmt(step).set_lineno(node.lineno))
        return node

    # jinja2 calls these methods by name.
    visit_For = _with_step
    visit_Macro = _with_step

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("measured"), [node], [], None, None)


class ChatTemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates. May be used from several threads.

    now: returns the local time, for templates that print the date.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        del self.filters["format"]  # its widths are in a format string, which is not checked
        del self.globals["lipsum"]
        self.filters = {name: _bounded(name, f) for name, f in self.filters.items()}
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _reject
        self.globals["strftime_now"] = lambda form: now().strftime(form)
        self._compiled: dict[str, Template] = {}

    def compile_template(self, source: str) -> Template:
        """Compile a template, or return a cached one. Raise RequestError if it is not valid."""
        if template := self._compiled.get(source):
            return template
        try:
            if len(source) > MAX_TEMPLATE_CHARS:
                _reject(f"the template is longer than {MAX_TEMPLATE_CHARS} characters")
            tree: nodes.Template = _Metering().visit(self.parse(source))
            template = self.from_string(tree)
        except (TemplateError, SyntaxError, RecursionError, ValueError) as error:
            line = getattr(error, "lineno", None)
            location = f" in line {line}" if line else ""
            raise RequestError(
                f"the chat template is not valid{location}: {_describe(error)}.",
                parameter="chat_template",
            ) from error
        if len(self._compiled) >= MAX_CACHED:
            self._compiled.clear()
        self._compiled[source] = template
        return template

    def take_step(self, context: Context) -> None:
        """Count a step of a loop or macro. Called by the code that `_Metering` adds."""
        budget = context.parent[STEPS_LEFT]
        budget[0] -= 1
        if budget[0] < 0:
            _reject(f"the template takes more than {MAX_STEPS} steps")

    def measured(self, value: Any) -> Any:
        """Return `value`. Raise TemplateError if it is a string or list above the limit."""
        if isinstance(value, (str, list, tuple)) and len(value) > MAX_TEXT_CHARS:
            _reject(f"the template creates a string or list that is longer than {MAX_TEXT_CHARS}")
        return value

    def call(
        __self,  # noqa: N805  # as in the base class, so that templates can use any keyword
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call an object with limits on numeric arguments and on the result."""
        name = getattr(__obj, "__name__", "")
        inner = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        receiver = getattr(inner, "__self__", None)
        values = (*args, *kwargs.values())
        _check_numbers(name, values)
        if name in MULTIPLIERS:
            _check_product((receiver, *values))
        elif name in ("format", "format_map") and WIDE_FIELD.search(str(receiver)):
            _reject("the template formats a string with a field that is too wide")
        return __self.measured(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluate `left operator right`. Raise TemplateError if the result could be too large."""
        if operator == "*":
            _check_product((left, right))
        elif operator == "**" and not _is_small_power(left, right):
            _reject("the template computes a power that is too large")
        elif operator == "%" and isinstance(left, str):
            _reject("the template formats a string with %; join strings with ~ instead")
        return self.measured(super().call_binop(context, operator, left, right))


def _is_small_power(base: Any, exponent: Any) -> bool:
    return all(isinstance(x, (int, float)) and abs(x) <= 1024 for x in (base, exponent))


def _check_product(factors: Iterable[Any]) -> None:
    """Raise TemplateError if the product of the sizes of `factors` is too large."""
    product = 1
    for factor in factors:
        if isinstance(factor, int):
            product *= max(abs(factor), 1)
        elif isinstance(factor, (str, list, tuple)):
            product *= max(len(factor), 1)
    sized = any(isinstance(factor, (str, list, tuple)) for factor in factors)
    if product > (MAX_PRODUCT if sized else 1 << 256):
        _reject("the template computes a product that is too large")


def _check_numbers(name: str, values: Iterable[Any]) -> None:
    if any(isinstance(x, int) and abs(x) > MAX_NUMBER for x in values):
        _reject(f"the template calls {name or 'a function'} with a number above {MAX_NUMBER}")


def _bounded(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    """Return `filter_` with checks of its arguments, keeping its jinja2 attributes."""
    first = 1 if hasattr(filter_, "jinja_pass_arg") else 0

    @wraps(filter_)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        # The filtered value itself may be any number; the other arguments are sizes and counts.
        _check_numbers(name, (*args[first + 1 :], *kwargs.values()))
        if name in MULTIPLIERS:
            _check_product((*args[first:], *kwargs.values()))
        return filter_(*args, **kwargs)

    return bounded


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON. Unlike jinja2's filter, it does not escape <, > and &."""
    if indent is not None and not 0 <= indent <= 16:
        _reject("the template calls tojson with an invalid indent; use 0 to 16")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
