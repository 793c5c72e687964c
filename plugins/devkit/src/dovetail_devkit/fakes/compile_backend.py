"""A fake compile backend that interprets the graph, operation by operation.

The backend writes one file per graph to its directory, and counts the graphs whose file already
exists there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, ClassVar

from dovetail.interfaces.compile_backend import CompileBackend, CompileContext, CompileRequest


class FakeCompileBackend(CompileBackend):
    """Interprets graphs. num_compiled, num_found: graphs without and with a file, over all engines.

    requests: (number of tokens, number of inputs) of each graph, over all engines.
    """

    num_compiled: ClassVar[int] = 0
    num_found: ClassVar[int] = 0
    requests: ClassVar[list[tuple[int | None, int]]] = []

    def __init__(self, context: CompileContext) -> None:
        self._folder = context.cache_dir

    def compile(self, request: CompileRequest) -> Callable[..., Any]:
        """Return a function that interprets the graph."""
        from torch.fx import Interpreter

        graph, num_inputs = request.graph, len(request.example_inputs)
        cls = type(self)
        cls.requests.append((request.num_tokens, num_inputs))
        if self._folder is not None:
            text = f"{request.num_tokens} {graph.code}".encode()
            file = self._folder / "graphs" / hashlib.sha256(text).hexdigest()
            cls.num_found += file.exists()
            cls.num_compiled += not file.exists()
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(text)

        def run(*inputs: Any) -> Any:
            if len(inputs) != num_inputs:
                raise TypeError(f"expected {num_inputs} inputs, got {len(inputs)}")
            return Interpreter(graph).run(*inputs)

        return run

    def cache_key(self) -> str:
        """Return the version of the fake."""
        return "fake 1"
