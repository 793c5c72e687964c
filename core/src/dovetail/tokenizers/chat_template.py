"""Chat templates: conversations to prompt text, in a sandbox with limits.

A template comes with a model or with a request, so it is a program by a stranger. It sees only the
values it is given, cannot change them, and is stopped by counts (steps of loops and macros, lengths
of texts, sizes of numbers). Counts do not bound memory and time, so a template runs in a bounded
child process: use `dovetail.tokenizers.template_renderer`, which runs this module there.
Depends on no tokens: `dovetail.tokenizers.huggingface` brings their texts as variables.
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
"""Longest text that a template may make, in between or in the end."""
MAX_STEPS = 200_000
"""Passes through loops and calls of macros in one rendering."""
MAX_NUMBER = 1_000_000
"""Largest integer that may be an argument: widths and counts, not values of the user's."""
MAX_PRODUCT = 1 << 26
"""Bound on the product of the arguments' sizes where a function multiplies them."""
MAX_CACHED = 32
STEPS_LEFT = "steps left"
"""Name of the budget among the variables; no template can spell it."""
MULTIPLIERS = frozenset({"replace", "join", "translate"})
WIDE_FIELD = re.compile(r"\d{5,}")


def render_chat_template(
    template: Template, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str:
    """Render `messages` with `template`, which came from `ChatTemplateEnvironment`.

    variables: what else the template may see (add_generation_prompt, tools, bos_token, …).
    Nothing is mutated. Raises RequestError, parameter "messages", if `messages` is no conversation
    or the template refuses it, fails or exceeds a limit.
    """
    check_messages(messages)
    given = {"tools": None, "documents": None, **variables}
    pieces: list[str] = []
    length = 0
    try:
        for piece in template.generate({**given, "messages": messages, STEPS_LEFT: [MAX_STEPS]}):
            length += len(piece)
            if length > MAX_TEXT_CHARS:
                _refuse(f"the prompt is longer than {MAX_TEXT_CHARS} characters")
            pieces.append(piece)
    except Exception as error:  # whatever a stranger's program raises is about this request
        raise RequestError(
            f"the chat template could not render the conversation: {_describe(error)}. "
            "Change the messages, or give another chat_template.",
            parameter="messages",
        ) from error
    return "".join(pieces)


def _describe(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 300 else text[:297] + "..."


def _refuse(reason: str) -> NoReturn:
    raise TemplateError(reason)


class _Generation(Extension):
    """Take `{% generation %}` for what it marks: training tools look at the tag, we do not."""

    tags = {"generation"}  # noqa: RUF012  # the base class's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Metering(NodeTransformer):
    """Put a step at the head of every loop and macro, and a measure around every `~`."""

    def _with_step(self, node: nodes.For | nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        step = nodes.Call(
            nodes.EnvironmentAttribute("take_step"), [nodes.ContextReference()], [], None, None
        )
        node.body.insert(0, nodes.ExprStmt(step).set_lineno(node.lineno))
        return node

    # jinja2 finds these by their names.
    visit_For = _with_step
    visit_Macro = _with_step

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("measured"), [node], [], None, None)


class ChatTemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates; may be used from several threads.

    now: tells the local time to templates that print the date.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        del self.filters["format"]  # its widths hide in a text
        del self.globals["lipsum"]
        self.filters = {name: _bounded(name, f) for name, f in self.filters.items()}
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda form: now().strftime(form)
        self._compiled: dict[str, Template] = {}

    def compile_template(self, source: str) -> Template:
        """Return the compiled template; the last few are kept. Raise RequestError if it is none."""
        if template := self._compiled.get(source):
            return template
        try:
            if len(source) > MAX_TEMPLATE_CHARS:
                _refuse(f"it is longer than {MAX_TEMPLATE_CHARS} characters")
            tree: nodes.Template = _Metering().visit(self.parse(source))
            template = self.from_string(tree)
        except (TemplateError, SyntaxError, RecursionError, ValueError) as error:
            line = getattr(error, "lineno", None)
            place = f" in line {line}" if line else ""
            raise RequestError(
                f"the chat template is not valid{place}: {_describe(error)}.",
                parameter="chat_template",
            ) from error
        if len(self._compiled) >= MAX_CACHED:
            self._compiled.clear()
        self._compiled[source] = template
        return template

    def take_step(self, context: Context) -> None:
        """Count a step; called by the code that `_Metering` puts in."""
        budget = context.parent[STEPS_LEFT]
        budget[0] -= 1
        if budget[0] < 0:
            _refuse(f"the template takes more than {MAX_STEPS} steps")

    def measured(self, value: Any) -> Any:
        """Return `value`, if it is not too long a text or list."""
        if isinstance(value, (str, list, tuple)) and len(value) > MAX_TEXT_CHARS:
            _refuse(f"the template makes a value longer than {MAX_TEXT_CHARS}")
        return value

    def call(
        __self,  # noqa: N805  # as the base class has it: keywords of the template stay free
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call an object with bounded numbers, for a bounded result."""
        name = getattr(__obj, "__name__", "")
        inner = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        receiver = getattr(inner, "__self__", None)
        values = (*args, *kwargs.values())
        _check_numbers(name, values)
        if name in MULTIPLIERS:
            _check_product((receiver, *values))
        elif name in ("format", "format_map") and WIDE_FIELD.search(str(receiver)):
            _refuse("the template formats a text with too wide a field")
        return __self.measured(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Do `left operator right` if the result cannot be huge."""
        if operator == "*":
            _check_product((left, right))
        elif operator == "**" and not _is_small_power(left, right):
            _refuse("the template computes too large a power")
        elif operator == "%" and isinstance(left, str):
            _refuse("the template formats a text with %; join texts with ~ instead")
        return self.measured(super().call_binop(context, operator, left, right))


def _is_small_power(base: Any, exponent: Any) -> bool:
    return all(isinstance(x, (int, float)) and abs(x) <= 1024 for x in (base, exponent))


def _check_product(factors: Iterable[Any]) -> None:
    """Refuse to multiply if a text, list or number in `factors` makes the result too large."""
    product = 1
    for factor in factors:
        if isinstance(factor, int):
            product *= max(abs(factor), 1)
        elif isinstance(factor, (str, list, tuple)):
            product *= max(len(factor), 1)
    sized = any(isinstance(factor, (str, list, tuple)) for factor in factors)
    if product > (MAX_PRODUCT if sized else 1 << 256):
        _refuse("the template multiplies to too large a value")


def _check_numbers(name: str, values: Iterable[Any]) -> None:
    if any(isinstance(x, int) and abs(x) > MAX_NUMBER for x in values):
        _refuse(f"the template calls {name or 'something'} with a number above {MAX_NUMBER}")


def _bounded(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    """Return `filter_` with its arguments bounded; it keeps the marks that jinja2 puts on it."""
    first = 1 if hasattr(filter_, "jinja_pass_arg") else 0

    @wraps(filter_)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        # The piped value may be any number: only what tells how much to make is bounded.
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
    """Return `value` as JSON; unlike jinja2's own filter it leaves <, > and & alone."""
    if indent is not None and not 0 <= indent <= 16:
        _refuse("tojson takes an indent from 0 to 16")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
