"""Verdicts: what becomes of one candidate for a place in an engine, by which rule, and why."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from dovetail.errors import PluginError
from dovetail.interfaces.attention import AttentionRequirements
from dovetail.interfaces.platform import Platform
from dovetail.plugins.metadata.discovery import Candidate

AUTO = "auto"

TAKEN = "taken"
ABLE = "able"
"""It could serve, but another has precedence."""
REFUSED = "refused"
"""It cannot serve here, or does not meet the requirements."""
FAILED = "failed"
"""It could not be described or loaded, or its probe failed."""
UNKNOWN = "unknown"
"""It would be tried first, but what the model requires of it is not known."""
OUT = "out"
"""It does not take part: denied, replaced, not allowed, used only if named, or not named."""


@dataclass(frozen=True, kw_only=True)
class Criteria:
    """What a configuration requires of the plugin of one kind.

    references: what the user named, in order; ("auto",) for automatic selection, () for none.
    why: where that comes from. requirements: what an attention backend has to do; None if not known
    yet. config_requirements: the part of them that the configuration alone decides (heads of size
    0), for attention whose `requirements` is None. platform: None while that is being selected.
    provides: capability ids that the class must provide. dtype: of the model; "" if not known.
    batch_invariant: whether only parts that promise equal bits in every batch are accepted.
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
        """The name of the platform; "" without one."""
        return "" if self.platform is None else self.platform.info.name


@dataclass(frozen=True, kw_only=True)
class Verdict(Candidate):
    """What becomes of one candidate.

    place: when it is tried, from 1; 0 if it is not. standing: what gives it that place. state: one
    of this module's words. rule: which rule decided. reasons: for the state, each a phrase or
    sentence. batch_invariant: whether it promises equal bits in every batch in the dtype of the
    model, on which seeded requests rely; None for kinds without such a promise, and for a class
    that was not loaded. cls: the class, if it was loaded. error: what went wrong; is_fatal: the
    start of an engine raises that error.
    """

    rank: int = 0
    place: int = 0
    standing: str = ""
    state: str = OUT
    rule: str = ""
    reasons: tuple[str, ...] = ()
    batch_invariant: bool | None = None
    cls: type[Any] | None = field(default=None, repr=False)
    error: PluginError | None = field(default=None, repr=False)
    is_fatal: bool = False

    def facts(self) -> dict[str, object]:
        """Return the verdict as plain data, without the class and the error object."""
        shown = (one.name for one in fields(self) if one.name not in ("cls", "error", "is_fatal"))
        return {name: getattr(self, name) for name in shown}

    def refused(self, rule: str, *reasons: str) -> Verdict:
        """Return this verdict after a rule said no."""
        return replace(self, state=REFUSED, rule=rule, reasons=reasons)

    def failed(self, rule: str, error: PluginError, *, is_fatal: bool) -> Verdict:
        """Return this verdict after a rule could not be applied."""
        reasons = (str(error),)
        return replace(
            self, state=FAILED, rule=rule, reasons=reasons, error=error, is_fatal=is_fatal
        )
