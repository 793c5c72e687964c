"""Verdicts: whether a candidate is selected, with the deciding rule and the reasons."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from dovetail.errors import PluginError
from dovetail.interfaces.attention import AttentionRequirements
from dovetail.interfaces.platform import Platform
from dovetail.plugins.metadata.discovery import Candidate

AUTO = "auto"

SELECTED = "selected"
USABLE = "usable"
"""The plugin is usable, but another one has precedence."""
REJECTED = "rejected"
"""The plugin cannot be used here or does not meet the requirements."""
FAILED = "failed"
"""The plugin cannot be described or loaded, or its probe failed."""
UNKNOWN = "unknown"
"""The plugin would be tried first, but the model's requirements are unknown."""
NOT_TRIED = "not tried"
"""The plugin is not tried: it is denied, replaced, not allowed, or not requested."""


@dataclass(frozen=True, kw_only=True)
class Criteria:
    """The requirements of a configuration on the plugin of one kind.

    references: the plugins that the user requested, in order; ("auto",) for automatic selection, ()
    for none.
    why: the source of the request. requirements: requirements on an attention backend; None if not
    known yet. config_requirements: the part that the configuration alone determines (head size 0),
    used if `requirements` is None. platform: None while the platform is being selected.
    provides: capability ids that the class must provide. dtype: the model's dtype; "" if unknown.
    batch_invariant: whether only batch-invariant plugins are accepted.
    """

    references: tuple[str | type, ...]
    why: str = ""
    requirements: AttentionRequirements | None = None
    config_requirements: AttentionRequirements | None = None
    platform: Platform | None = None
    provides: frozenset[str] = frozenset()
    dtype: str = ""
    batch_invariant: bool = False

    @property
    def platform_name(self) -> str:
        """The name of the platform, or "" for none."""
        return "" if self.platform is None else self.platform.info.name


@dataclass(frozen=True, kw_only=True)
class Verdict(Candidate):
    """The verdict on one candidate.

    place: position of the candidate in the order, from 1; 0 if the candidate is not tried.
    standing: the reason for that position. state: one of the constants of this module. rule: the
    deciding rule. reasons: phrases or sentences about the state. batch_invariant: whether it is
    batch-invariant in the dtype of the model; None for kinds that do not declare it, and for a
    class that was not loaded. cls: the class, if it was loaded. error: the error of a failed
    candidate. is_fatal: whether the engine raises that error at startup.
    """

    rank: int = 0
    place: int = 0
    standing: str = ""
    state: str = NOT_TRIED
    rule: str = ""
    reasons: tuple[str, ...] = ()
    batch_invariant: bool | None = None
    cls: type[Any] | None = field(default=None, repr=False)
    error: PluginError | None = field(default=None, repr=False)
    is_fatal: bool = False

    def facts(self) -> dict[str, object]:
        """Return the verdict as plain data, without the class and the error object."""
        shown = (
            item.name for item in fields(self) if item.name not in ("cls", "error", "is_fatal")
        )
        return {name: getattr(self, name) for name in shown}

    def rejected(self, rule: str, *reasons: str) -> Verdict:
        """Return this verdict with the state REJECTED."""
        return replace(self, state=REJECTED, rule=rule, reasons=reasons)

    def failed(self, rule: str, error: PluginError, *, is_fatal: bool) -> Verdict:
        """Return this verdict with the state FAILED, because the rule raised `error`."""
        reasons = (str(error),)
        return replace(
            self, state=FAILED, rule=rule, reasons=reasons, error=error, is_fatal=is_fatal
        )
