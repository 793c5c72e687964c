"""The workload of the `bench` commands: random prompts of fixed length, greedy sampling.

Prompts are random token ids and differ in every run, so that the prefix cache has no hits. Nothing
is detokenized.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

from cyclopts import Group, Parameter

from dovetail.errors import ConfigError, EngineDeadError
from dovetail.outputs import RequestOutputKind
from dovetail.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dovetail.clock import Clock
    from dovetail.engine.llm_engine import LLMEngine

R = TypeVar("R")
BENCH_GROUP = Group("Benchmark options", sort_key=1)


def _option(text: str) -> Parameter:
    return Parameter(help=text, group=BENCH_GROUP)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of the workload: lengths in tokens, and numbers of runs."""

    input_len: Annotated[int, _option("Number of tokens in each prompt.")] = 128
    output_len: Annotated[int, _option("Number of tokens in each output.")] = 64
    warmup: Annotated[int, _option("Number of warm-up runs, which are not counted.")] = 1
    repeats: Annotated[int, _option("Number of runs that are counted.")] = 5


DEFAULT_BENCH = BenchOptions()


@dataclass(frozen=True, kw_only=True)
class Run:
    """The times of one run. All requests are added before the first step of the run.

    start_ns: time before the first request was added. token_times_ns: one time per step with new
    tokens; the last time is the end of the run.
    """

    start_ns: int
    token_times_ns: tuple[int, ...]

    @property
    def total_s(self) -> float:
        """Seconds from `start_ns` to the last token."""
        return (self.token_times_ns[-1] - self.start_ns) / 1e9

    @property
    def first_token_s(self) -> float:
        """Seconds from `start_ns` to the first token of any request."""
        return (self.token_times_ns[0] - self.start_ns) / 1e9


def check_workload(options: BenchOptions, num_prompts: int) -> None:
    """Raise ConfigError for options that are invalid for any model."""
    minimum = {"input_len": 1, "output_len": 1, "warmup": 0, "repeats": 1}
    values: Mapping[str, int] = {**vars(options), "num_prompts": num_prompts}
    for name, value in values.items():
        if value < minimum.get(name, 1):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {value} must be at least {minimum.get(name, 1)}.")


def measure(
    engine: LLMEngine,
    options: BenchOptions,
    num_prompts: int,
    clock: Clock,
    note: Callable[[str], None],
) -> list[Run]:
    """Run the workload and return the measured runs, each with `num_prompts` concurrent requests.

    note: called with a description before each run. Raises ConfigError if a request is longer than
    the engine's `max_model_len`.
    """
    length = options.input_len + options.output_len
    if length > engine.max_model_len:
        raise ConfigError(
            f"--input-len {options.input_len} and --output-len {options.output_len} add up "
            f"to {length} tokens, but this engine allows at most {engine.max_model_len}. Lower "
            "one of them."
        )
    runs = []
    for number in range(options.warmup + options.repeats):
        counted = number >= options.warmup
        index = number - options.warmup if counted else number
        note(f"{'run' if counted else 'warm-up'} {index + 1}")
        source = random.Random(f"{engine.config.model.seed}:{number}")
        prompts = [
            [source.randrange(engine.vocab_size) for _ in range(options.input_len)]
            for _ in range(num_prompts)
        ]
        run = _run(engine, prompts, options.output_len, clock)
        if counted:
            runs.append(run)
    return runs


def _run(engine: LLMEngine, prompts: list[list[int]], output_len: int, clock: Clock) -> Run:
    params = SamplingParams(
        temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False
    )
    start_ns = clock.now_ns()
    for number, prompt in enumerate(prompts):
        engine.add_request(
            f"bench-{number}",
            {"prompt_token_ids": prompt},
            params,
            output_kind=RequestOutputKind.DELTA,
        )
    times_ns, num_tokens = [], 0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if not outputs:
            continue
        times_ns.append(clock.now_ns())
        num_tokens += sum(
            len(completion.token_ids) for out in outputs for completion in out.outputs
        )
    expected = output_len * len(prompts)
    if num_tokens != expected:
        raise EngineDeadError(f"the engine generated {num_tokens} tokens instead of {expected}.")
    return Run(start_ns=start_ns, token_times_ns=tuple(times_ns))
