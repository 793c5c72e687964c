"""The conformance suite of the attention contract, for any backend on any device.

`check_attention` compares a backend with a dense float64 reference for all its claims: dtypes, head
sizes, block sizes, cache dtypes and features (`dovetail_devkit.attention.claims`). It uses only the
contract: the backend writes the cache itself, and the suite does not know the layout. torch is
imported within functions.

The tolerance is |actual - expected| ≤ t · max(1, |expected|), with t of `AttentionCase.tolerance`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dovetail.interfaces.attention import (
    AttentionBackend,
    AttentionCapabilities,
    AttentionRequirements,
)
from dovetail_devkit.attention.case import AttentionCase, other_cache_cases, standard_cases
from dovetail_devkit.attention.claims import claim_cases
from dovetail_devkit.attention.reference import reference_attention
from dovetail_devkit.attention.rows import AttentionRows
from dovetail_devkit.case import Case
from dovetail_devkit.comparison import TOLERANCES
from dovetail_devkit.expectation import SkipCase, expect

if TYPE_CHECKING:
    import torch

__all__ = [
    "AttentionCase",
    "attention_cases",
    "check_attention",
    "check_case",
    "check_rejections",
    "reference_attention",
    "standard_cases",
]

_FEATURES = (
    *("sliding_window", "soft_cap", "sinks", "alibi", "bidirectional", "cascade"),
    "a_feature_nobody_has",
)


def check_attention(backend: type[AttentionBackend], device: torch.device) -> None:
    """Check all claims of `backend` on `device`. Raise AssertionError with the first difference."""
    for case in attention_cases(backend, device):
        with suppress(SkipCase):
            case.run()


def attention_cases(backend: type[AttentionBackend], device: torch.device) -> Iterator[Case]:
    """Yield the suite's cases: cases for rejected requirements, then cases for the claims."""

    def check_accepted(case: AttentionCase) -> None:
        reasons = backend.refusals(case.requirements(device.type))
        if reasons:
            raise SkipCase("; ".join(reasons))
        check_case(backend, case, device)

    yield Case(name="refusals", run=partial(check_rejections, backend, device))
    capabilities = backend.capabilities
    for case in (*standard_cases(capabilities), *other_cache_cases(capabilities)):
        yield Case(name=str(case), run=partial(check_accepted, case))
    yield from claim_cases(backend, device)


def check_rejections(backend: type[AttentionBackend], device: torch.device) -> None:
    """Check that the backend accepts each dtype that it claims, and rejects what it does not claim.

    A backend may reject heads, features or cache dtypes on some machines, for example if the
    installed kernels lack them.
    """
    capabilities = backend.capabilities
    unknown = capabilities.dtypes - TOLERANCES.keys()
    expect(not unknown, f"the suite has no tolerance for the claimed dtypes {sorted(unknown)}")
    rejected: dict[str, tuple[AttentionRequirements, Sequence[str]]] = {}
    accepted: set[str] = set()
    for case in standard_cases(capabilities):
        requirements = case.requirements(device.type)
        expect(
            not capabilities.refusals(requirements),
            f"the capabilities of {backend.name} do not contain {requirements}",
        )
        reasons = backend.refusals(requirements)
        if reasons:
            rejected[case.dtype] = requirements, reasons
            continue
        accepted.add(case.dtype)
        for invalid in _requirements_beyond(capabilities, requirements):
            reasons = [*capabilities.refusals(invalid), *backend.refusals(invalid)]
            expect(
                bool(reasons),
                f"{backend.name} accepts {invalid}, which it does not claim to support",
            )
    for dtype in rejected.keys() - accepted:
        requirements, reasons = rejected[dtype]
        text = f"{backend.name} claims to support {requirements}, but rejects it: {reasons}"
        expect(False, text)


def _requirements_beyond(
    capabilities: AttentionCapabilities, requirements: AttentionRequirements
) -> Iterator[AttentionRequirements]:
    yield replace(requirements, dtype="float8_nobody")
    yield replace(requirements, kv_cache_dtype="float8_nobody")
    for feature in _FEATURES:
        if feature not in capabilities.features:
            yield replace(requirements, features=requirements.features | {feature})
    if capabilities.device_types:
        yield replace(requirements, device_type="abacus")
    if capabilities.head_sizes:
        yield replace(requirements, head_size=max(capabilities.head_sizes) + 1)
    if capabilities.block_size_multiple > 1:
        yield replace(requirements, block_size=capabilities.block_size_multiple + 1)


def check_case(backend: type[AttentionBackend], case: AttentionCase, device: torch.device) -> None:
    """Check one case on `device`. Raise AssertionError with the first difference.

    The case runs three steps on one cache: the contexts of the requests, the tokens of the case,
    and a decode of every request, which reads the cache that the other steps have written. An
    additional request is idle in the second step.
    """
    rows = AttentionRows(backend, case, device)
    contexts = [context for context, _ in case.runs]
    ends = [sum(run) for run in case.runs]
    bystander = len(case.runs)
    length = case.block_size + 2
    rows.step("contexts", [(r, 0, n) for r, n in [*enumerate(contexts), (bystander, length)] if n])
    rows.step("runs", [(r, contexts[r], n) for r, (_, n) in enumerate(case.runs)])
    rows.step("decodes", [(r, n, 1) for r, n in [*enumerate(ends), (bystander, length)]])
