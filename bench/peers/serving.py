"""The child's side of the line protocol: one JSON object per line in, one per line out.

A request is {"op": NAME, …arguments}; the response is the operation's result, or {"error": TEXT}.
The child continues after an error and exits when stdin is closed. Output of libraries goes to
stderr. It runs in the environments of the other engines, so it uses only the standard library and
not Dovetail.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

_PR_SET_PDEATHSIG = 1

Operation = Callable[..., dict[str, Any]]


class Engine(Protocol):
    """The interface of an adapter: greedy generation of exact numbers of tokens from token ids.

    An adapter may set `weights_s` in `load`: the seconds for the weights alone.
    """

    def load(self, model: str, weights: str, threads: int, options: Mapping[str, Any]) -> None:
        """Import the engine and load `model` with weights in the format "bf16", "int8" or "int4".

        options: the adapter's options from the peers file.
        """

    def prepare(self, prompts: Sequence[list[int]], output_lens: Sequence[int]) -> None:
        """Allocate the cache for these requests, as a server does before requests arrive."""

    def generate(
        self, prompts: Sequence[list[int]], output_lens: Sequence[int]
    ) -> list[Sequence[int]]:
        """Generate for all prompts in one call, ignoring EOS. Return the tokens of each."""

    def versions(self) -> dict[str, str]:
        """Return the versions of the packages that determine the speed."""


def serve(operations: Mapping[str, Operation]) -> None:
    """Serve requests from stdin until it is closed. Other code cannot use stdin and stdout."""
    _die_with_parent()
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    for line in requests:
        results.write(json.dumps(_answer(operations, json.loads(line))) + "\n")
        results.flush()


def serve_engine(engine: Engine) -> None:
    """Serve the operations `load` and `generate` of an adapter. Then exit without clean-up."""

    def load(model: str, weights: str, threads: int, options: dict[str, Any]) -> dict[str, Any]:
        begin = time.perf_counter()
        engine.load(model, weights, threads, options)
        return {
            "seconds": time.perf_counter() - begin,
            "weights_s": getattr(engine, "weights_s", None),
            "versions": engine.versions(),
        }

    def generate(prompts: list[list[int]], output_lens: list[int]) -> dict[str, Any]:
        engine.prepare(prompts, output_lens)
        begin = time.perf_counter()
        actual = engine.generate(prompts, output_lens)
        seconds = time.perf_counter() - begin
        lens = [len(tokens) for tokens in actual]
        if lens != output_lens:
            raise RuntimeError(f"requested {output_lens[:8]}… tokens, got {lens[:8]}…")
        return {"seconds": seconds, "first_tokens": [int(tokens[0]) for tokens in actual]}

    serve({"load": load, "generate": generate})
    # Some engines hang in their destructors; the process exits without them.
    sys.stderr.flush()
    os._exit(0)


def _die_with_parent() -> None:
    """Make Linux kill this process if its parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _answer(operations: Mapping[str, Operation], request: dict[str, Any]) -> dict[str, Any]:
    try:
        return operations[request.pop("op")](**request)
    except Exception as error:  # the parent reports the error and continues with the other engines
        return {"error": f"{type(error).__name__}: {error}"[:600]}
