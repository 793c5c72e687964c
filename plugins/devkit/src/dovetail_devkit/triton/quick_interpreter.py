"""A pytest plugin that makes Triton's interpreter faster, and its rounding like that of devices.

Triton's interpreter checks every 32-bit sum for overflow, and patches the language at each function
call of a kernel. Both take a third of the run time, although one patch per module is enough. The
interpreter truncates float32 to bfloat16 or 8 bits, but devices round to nearest. With this plugin,
torch does the conversion and rounds to nearest. Only processes of `interpreted` load this module.
Triton is imported within functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> Iterator[None]:
    """Replace slow functions of Triton's interpreter when pytest starts."""
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
        patch.setattr(interpreter, "_convert_float", _convert_float)
        yield


def _convert_float(array: Any, value: Any, target: Any, rounding_mode: Any) -> Any:
    """Convert bits of the type `value` to bits of the type `target`, both as unsigned integers."""
    torch: Any = import_module("torch")
    dtypes = {
        "fp8e4nv": torch.float8_e4m3fn,
        "fp8e5": torch.float8_e5m2,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
    }
    bits = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
    numbers = torch.from_numpy(array.copy().view(f"i{array.itemsize}").reshape(-1))
    numbers = numbers.view(dtypes[value.name]).to(dtypes[target.name])
    output = numbers.view(bits[target.primitive_bitwidth]).numpy().reshape(array.shape)
    return output.view(f"u{output.itemsize}")
