"""The conformance suite of the platform contract, for any platform.

If the platform cannot be used, only its declarations and its probe are checked: no other method may
be called. Accesses no device and needs no tensor library.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from dovetail.clock import MonotonicClock
from dovetail.config import EngineArgs, EngineConfig
from dovetail.config.resolve import resolve
from dovetail.interfaces.platform import ConfigPatch, Platform, PlatformInfo, Probe
from dovetail.plugin_kinds import KINDS
from dovetail_devkit.case import Case
from dovetail_devkit.contexts import write_fake_config
from dovetail_devkit.expectation import NotHere, expect, judging

MAX_PROBE_NS = 2_000_000_000
HEAVY = ("torch", "numpy", "transformers")
_CAPABILITY = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*")


@judging("in the platform suite")
def check_platform(platform_cls: type[Platform]) -> None:
    """Check a platform against its contract; raise AssertionError with the violated rule."""
    for case in platform_cases(platform_cls):
        with suppress(NotHere):
            case.run()


def platform_cases(platform_cls: type[Platform]) -> Iterator[Case]:
    """Yield the suite's cases: declarations and probe, then those of a usable platform."""

    def check_usable(check: Callable[[Platform], None]) -> None:
        probe = platform_cls.probe()
        if not probe.usable:
            raise NotHere("; ".join(probe.reasons))
        check(platform_cls())

    yield Case(name="declarations", run=partial(_check_declarations, platform_cls))
    yield Case(name="probe", run=partial(_check_probe, platform_cls))
    yield Case(name="answers", run=partial(check_usable, _check_answers))
    yield Case(name="wishes", run=partial(check_usable, _check_wishes))


def _check_declarations(platform_cls: type[Platform]) -> None:
    info = platform_cls.info
    expect(isinstance(info, PlatformInfo), f"info is {info!r}; it must be a PlatformInfo")
    expect(bool(info.name and info.device_type), f"{info} has an empty name")
    expect(isinstance(platform_cls.automatic, bool), "automatic must be True or False")
    expect(isinstance(platform_cls.rank, int), "rank must be an integer")


def _check_probe(platform_cls: type[Platform]) -> None:
    clock, environment, loaded = MonotonicClock(), dict(os.environ), set(sys.modules)
    start_ns = clock.now_ns()
    probe = platform_cls.probe()
    took_ns = clock.now_ns() - start_ns
    expect(isinstance(probe, Probe), f"probe returns {probe!r}; it must be a Probe")
    expect(took_ns < MAX_PROBE_NS, f"probe took {took_ns / 1e9:.1f} s")
    expect(dict(os.environ) == environment, "probe changes the environment")
    heavy = [name for name in HEAVY if name in sys.modules and name not in loaded]
    expect(not heavy, f"probe imports {heavy}")
    expect(platform_cls.probe() == probe, "a second probe returns something else")
    reasons = [reason for reason in probe.reasons if isinstance(reason, str) and reason]
    expect(len(reasons) == len(probe.reasons), f"reasons must be sentences: {probe.reasons!r}")
    expect(probe.usable or bool(reasons), "a negative probe must give a reason")


def _check_answers(platform: Platform) -> None:
    capabilities = platform.capabilities()
    expect(isinstance(capabilities, frozenset), "capabilities must be a frozenset")
    wrong = [c for c in capabilities if not isinstance(c, str) or not _CAPABILITY.fullmatch(c)]
    expect(not wrong, f"{wrong} are not capability ids")
    dtypes = [c for c in capabilities if c.startswith("dtype.")]
    expect(bool(dtypes), "a platform must declare a dtype, such as 'dtype.float32'")
    expect(
        platform.capabilities() == capabilities,
        "a second call of capabilities returns something else",
    )
    memory = platform.total_memory_bytes()
    expect(isinstance(memory, int) and memory > 0, f"total_memory_bytes is {memory!r}")
    for kind in KINDS:
        names = platform.prefer(kind)
        texts = isinstance(names, Sequence) and not isinstance(names, str)
        good = texts and all(isinstance(name, str) and name for name in names)
        expect(good, f"prefer({kind!r}) returns {names!r}; it must be a sequence of names")
        expect(len(set(names)) == len(names), f"prefer({kind!r}) contains a name twice: {names!r}")
    expect(not platform.prefer("no_such_kind"), "prefer returns names for an unknown kind")


def _check_wishes(platform: Platform) -> None:
    with TemporaryDirectory() as folder:
        args = EngineArgs(model=write_fake_config(Path(folder)))
        config = args.create_engine_config()
    before = config.model_dump()
    patch = platform.defaults(config)
    expect(isinstance(patch, ConfigPatch), f"defaults returns {patch!r}, not a ConfigPatch")
    for field, wish in patch.changes.items():
        good = isinstance(wish, tuple) and len(wish) == 2 and isinstance(wish[1], str) and wish[1]
        expect(bool(good), f"defaults: {field} is {wish!r}; it must be (value, reason)")
    resolved = resolve(config, platform)
    expect(config.model_dump() == before, "defaults or problems change the configuration")
    expect(resolve(config, platform) == resolved, "two calls of defaults return different results")
    _check_resolved(platform, resolved, patch)


def _check_resolved(platform: Platform, resolved: EngineConfig, patch: ConfigPatch) -> None:
    changes = [change for change in resolved.changes if change.field in patch.changes]
    for change in changes:
        expect(bool(change.reason), f"{change.field} was set without a reason")
    problems = platform.problems(resolved)
    texts = isinstance(problems, Sequence) and not isinstance(problems, str)
    expect(texts, f"problems returns {problems!r}; it must be a sequence of sentences")
    expect(not problems, f"a plain configuration cannot run here: {list(problems)}")
