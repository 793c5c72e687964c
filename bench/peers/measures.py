"""Computes the results of a case from the seconds that an engine takes for its requests.

A `SendCase` sends the prompts of a case and returns the seconds that the engine took.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from cases import CASES, Case

from peers.limits import MachineLimits, ModelShape, decode_seconds, prompt_seconds

SendCase = Callable[[Case], float]
Bound = Callable[[Case, ModelShape, str, MachineLimits], float]

START_UP = "startup"
"""The case without requests: seconds from the start of the process to the first token."""

HOG = Case(name="hog", prompt_lens=(32,) * 4, output_lens=(32,) * 4)
ALL_CASES = {**CASES, HOG.name: HOG}
NUM_WARM_UP_TOKENS = 4
HOG_LIMIT_S = 600

_HOG_SCRIPT = """
import os, sys, time
parent, core, end = int(sys.argv[1]), int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {core})
print("busy", flush=True)
while os.getppid() == parent and time.monotonic() < end:
    for _ in range(100_000):
        pass
"""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """The method that measures one case.

    title: title of its column. run: sends requests and returns results; the tables show "value".
    bound: the best value that the machine allows; None if unknown.
    """

    title: str
    run: Callable[[SendCase, Case], dict[str, float]]
    bound: Bound | None = None
    lower_is_better: bool = False


def warm_up(send: SendCase, case: Case) -> None:
    """Run the case once with few tokens, to complete lazy initialization."""
    send(replace(case, output_lens=tuple(min(n, NUM_WARM_UP_TOKENS) for n in case.output_lens)))


def _steps(send: SendCase, case: Case) -> dict[str, float]:
    """Return the steps per second of one request, excluding the time of its first token."""
    first = send(replace(case, output_lens=(1,) * len(case.output_lens)))
    whole = send(case)
    return {"value": (case.output_lens[0] - 1) / (whole - first), "first_token_s": first}


def _outputs(send: SendCase, case: Case) -> dict[str, float]:
    return {"value": sum(case.output_lens) / send(case)}


def _prompts(send: SendCase, case: Case) -> dict[str, float]:
    return {"value": sum(case.prompt_lens) / send(case)}


def _with_a_busy_core(send: SendCase, case: Case) -> dict[str, float]:
    """Return output tokens per second, without and with a process that keeps one core busy."""
    alone = _outputs(send, case)["value"]
    with busy_core():
        others = _outputs(send, case)["value"]
    return {"value": others, "alone": alone}


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Keep the last usable core busy with another process."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
    arguments = [str(os.getpid()), str(max(cores)), str(HOG_LIMIT_S)]
    command = [sys.executable, "-c", _HOG_SCRIPT, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as hog:
        assert hog.stdout is not None
        try:
            hog.stdout.readline()
            yield
        finally:
            hog.kill()


def _step_bound(case: Case, shape: ModelShape, weights: str, limits: MachineLimits) -> float:
    return (case.output_lens[0] - 1) / decode_seconds(case, shape, weights, limits)


def _output_bound(case: Case, shape: ModelShape, weights: str, limits: MachineLimits) -> float:
    prompts = prompt_seconds(case, shape, weights, limits)
    return sum(case.output_lens) / (prompts + decode_seconds(case, shape, weights, limits))


def _prompt_bound(case: Case, shape: ModelShape, weights: str, limits: MachineLimits) -> float:
    return sum(case.prompt_lens) / prompt_seconds(case, shape, weights, limits)


MEASURES = {
    "decode1": Measure(title="1 request, tok/s", run=_steps, bound=_step_bound),
    "conc16": Measure(title="16 at once, output tok/s", run=_outputs, bound=_output_bound),
    "varied64": Measure(title="64 mixed, output tok/s", run=_outputs, bound=_output_bound),
    "prefill1024": Measure(title="prefill 1,024, tok/s", run=_prompts, bound=_prompt_bound),
    "hog": Measure(title="4 at once with a busy core, output tok/s", run=_with_a_busy_core),
}
