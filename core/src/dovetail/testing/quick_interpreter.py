"""A pytest plugin: Triton's interpreter without what it does twice, a third of its time.

It watches every 32-bit sum for an overflow, and prepares the language anew each time that a kernel
calls a function, though once for each module of functions will do. Results are the same.
`interpreted` loads it into the processes that it starts; nothing else should. Triton is imported
within functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> Iterator[None]:
    """Change the interpreter for the whole session."""
    interpreter: Any = import_module("triton.runtime.interpreter")
    builder, function_cls = interpreter.interpreter_builder, interpreter.InterpretedFunction
    whole_call, prepared = function_cls.__call__, set()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.fn.__module__ in prepared:
            return function.rewrite()(*args, **kwargs)
        prepared.add(function.fn.__module__)
        return whole_call(function, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        patch.setattr(function_cls, "__call__", call)
        yield
