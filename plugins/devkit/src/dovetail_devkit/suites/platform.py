"""The conformance suite of the platform contract, for any platform.

If the platform cannot be used, only its declarations and its probe are checked, because no other
method may be called. The suite accesses no device and needs no tensor library.
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
from dovetail_devkit.expectation import SkipCase, checking, expect

MAX_PROBE_NS = 2_000_000_000
HEAVY = ("torch", "numpy", "transformers")
_CAPABILITY = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*")


@checking("platform")
def check_platform(platform_cls: type[Platform]) -> None:
    """Check a platform against its contract. Raise AssertionError with the violated rule."""
    for case in platform_cases(platform_cls):
        with suppress(SkipCase):
            case.run()


def platform_cases(platform_cls: type[Platform]) -> Iterator[Case]:
    """Yield the suite's cases: declarations and probe, then the cases for a usable platform."""

    def check_usable(check: Callable[[Platform], None]) -> None:
        probe = platform_cls.probe()
        if not probe.usable:
            raise SkipCase("; ".join(probe.reasons))
        check(platform_cls())

    yield Case(name="declarations", run=partial(_check_declarations, platform_cls))
    yield Case(name="probe", run=partial(_check_probe, platform_cls))
    yield Case(name="answers", run=partial(check_usable, _check_answers))
    yield Case(name="defaults", run=partial(check_usable, _check_defaults))


def _check_declarations(platform_cls: type[Platform]) -> None:
    info = platform_cls.info
    expect(
        isinstance(info, PlatformInfo), f"the attribute info is {info!r}; expected a PlatformInfo"
    )
    expect(bool(info.name and info.device_type), f"the name or device_type of {info} is empty")
    expect(
        isinstance(platform_cls.automatic, bool), "the attribute automatic must be True or False"
    )
    expect(isinstance(platform_cls.rank, int), "the attribute rank must be an integer")


def _check_probe(platform_cls: type[Platform]) -> None:
    clock, environment, loaded = MonotonicClock(), dict(os.environ), set(sys.modules)
    start_ns = clock.now_ns()
    probe = platform_cls.probe()
    took_ns = clock.now_ns() - start_ns
    expect(isinstance(probe, Probe), f"probe() returns {probe!r}; expected a Probe")
    expect(
        took_ns < MAX_PROBE_NS,
        f"probe() takes {took_ns / 1e9:.1f} s, but the limit is {MAX_PROBE_NS / 1e9:g} s",
    )
    expect(dict(os.environ) == environment, "probe must not change environment variables")
    heavy = [name for name in HEAVY if name in sys.modules and name not in loaded]
    expect(not heavy, f"probe must not import {heavy}")
    expect(platform_cls.probe() == probe, "two calls of probe() must return equal results")
    reasons = [reason for reason in probe.reasons if isinstance(reason, str) and reason]
    expect(
        len(reasons) == len(probe.reasons),
        f"each reason of a probe must be a non-empty str; the reasons are {probe.reasons!r}",
    )
    expect(probe.usable or bool(reasons), "a probe with usable=False must give a reason")


def _check_answers(platform: Platform) -> None:
    capabilities = platform.capabilities()
    expect(isinstance(capabilities, frozenset), "capabilities must return a frozenset")
    invalid = [c for c in capabilities if not isinstance(c, str) or not _CAPABILITY.fullmatch(c)]
    expect(not invalid, f"capabilities() returns {invalid}, which are not valid capability ids")
    dtypes = [c for c in capabilities if c.startswith("dtype.")]
    expect(bool(dtypes), "capabilities must contain a dtype, such as 'dtype.float32'")
    expect(
        platform.capabilities() == capabilities,
        "two calls of capabilities() must return equal results",
    )
    memory = platform.total_memory_bytes()
    expect(
        isinstance(memory, int) and memory > 0,
        f"total_memory_bytes returns {memory!r}; expected a positive int",
    )
    for kind in KINDS:
        names = platform.prefer(kind)
        texts = isinstance(names, Sequence) and not isinstance(names, str)
        valid = texts and all(isinstance(name, str) and name for name in names)
        expect(valid, f"prefer({kind!r}) returns {names!r}; expected a sequence of names")
        expect(
            len(set(names)) == len(names),
            f"prefer({kind!r}) returns {names!r}, which contains a name twice",
        )
    expect(
        not platform.prefer("no_such_kind"),
        "prefer must return an empty sequence for an unknown kind",
    )


def _check_defaults(platform: Platform) -> None:
    with TemporaryDirectory() as folder:
        args = EngineArgs(model=write_fake_config(Path(folder)))
        config = args.create_engine_config()
    before = config.model_dump()
    patch = platform.defaults(config)
    expect(isinstance(patch, ConfigPatch), f"defaults() returns {patch!r}; expected a ConfigPatch")
    for field, entry in patch.changes.items():
        is_pair = isinstance(entry, tuple) and len(entry) == 2
        expect(
            is_pair and isinstance(entry[1], str) and bool(entry[1]),
            f"defaults() returns {entry!r} for {field}; expected (value, reason)",
        )
    resolved = resolve(config, platform)
    expect(
        config.model_dump() == before,
        "defaults and problems must not change their argument, the configuration",
    )
    expect(
        resolve(config, platform) == resolved,
        "two calls of defaults with the same configuration must return equal results",
    )
    _check_resolved(platform, resolved, patch)


def _check_resolved(platform: Platform, resolved: EngineConfig, patch: ConfigPatch) -> None:
    changes = [change for change in resolved.changes if change.field in patch.changes]
    for change in changes:
        expect(bool(change.reason), f"defaults() sets {change.field} without a reason")
    problems = platform.problems(resolved)
    texts = isinstance(problems, Sequence) and not isinstance(problems, str)
    expect(texts, f"problems() returns {problems!r}; expected a sequence of str")
    expect(
        not problems,
        f"problems() must be empty for a default configuration; it returns {list(problems)}",
    )
