"""The mutated files, and the suites of the conformance kit that must detect the mutants.

Only the kit tests a target, as it would test a third party's implementation.
"""

from __future__ import annotations

from dataclasses import dataclass

SKIPPED_FUNCTIONS = frozenset({"check_integrity"})
"""Functions that are not mutated: internal checks, which have no effect in a correct program."""

_SCHEDULING = (
    ("policy", "priority"),
    ("scheduler", "fcfs"),
    ("policy", "dovetail_devkit.fakes.policy:AgingPolicy"),
)
_RUNNER = "platforms/torch/src/dovetail_torch/runner"
_ATTENTION = "attention_backends/torch/src/dovetail_attn_torch"


@dataclass(frozen=True, kw_only=True)
class Target:
    """One file.

    path: relative to the root of the project. suites: (kind, plugin) in execution order. minimum:
    the minimum share of killed mutants.
    """

    path: str
    suites: tuple[tuple[str, str], ...]
    minimum: float = 0.8

    @property
    def module(self) -> str:
        """The dotted module name of the file."""
        return self.path.partition("src/")[2].removesuffix(".py").replace("/", ".")


TARGETS = (
    Target(path="core/src/dovetail/scheduling/scheduler.py", suites=_SCHEDULING),
    Target(path="core/src/dovetail/scheduling/draft.py", suites=_SCHEDULING),
    Target(path="core/src/dovetail/kv_cache/block_pool.py", suites=_SCHEDULING),
    Target(path="core/src/dovetail/kv_cache/manager.py", suites=_SCHEDULING),
    Target(path="core/src/dovetail/executors/uniproc.py", suites=(("executor", "uniproc"),)),
    # The surviving mutants only affect speed: sizes of scratch memory and groups, shortcuts to the
    # same indices. All of them were reviewed; none changes a result.
    Target(path=f"{_ATTENTION}/metadata.py", suites=(("attention", "torch"),), minimum=0.75),
    Target(path=f"{_ATTENTION}/layer.py", suites=(("attention", "torch"),)),
    Target(path=f"{_RUNNER}/request_rows.py", suites=(("worker", "cpu"),)),
    Target(path=f"{_RUNNER}/input_batch.py", suites=(("worker", "cpu"),)),
)
