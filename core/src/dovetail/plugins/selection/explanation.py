"""Explanations: every candidate for a place in an engine, with its verdict and every reason.

The verdicts are those by which an engine selects (`judge`). Sets nothing aside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dovetail.plugins.registry import PluginRegistry
from dovetail.plugins.selection.judging import judge, no_winner
from dovetail.plugins.selection.verdict import AUTO, TAKEN, Criteria, Verdict


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Which plugin serves in a place, and why.

    verdicts: in the order in which candidates are tried, then those that are not. error: why the
    place stays empty; "" if it does not, or if no plugin is requested.
    """

    kind: str
    criteria: Criteria
    verdicts: tuple[Verdict, ...]
    error: str = ""

    @property
    def chosen(self) -> tuple[Verdict, ...]:
        """Those that are selected."""
        return tuple(verdict for verdict in self.verdicts if verdict.state == TAKEN)

    def with_state(self, state: str, *reasons: str) -> Explanation:
        """Return this explanation without a winner: it gets `state` and further reasons."""
        verdicts = tuple(
            replace(one, state=state, reasons=(*one.reasons, *reasons))
            if one.state == TAKEN
            else one
            for one in self.verdicts
        )
        return replace(self, verdicts=verdicts)


def explain(registry: PluginRegistry, kind: str, criteria: Criteria) -> Explanation:
    """Return what becomes of every plugin of `kind`; raise PluginNotFoundError for no such kind.

    registry: bound to the platform, unless `kind` is "platform".
    """
    found = tuple(judge(registry, kind, criteria))
    errors = [str(one.error) for one in found if one.is_fatal]
    is_taken = any(one.state == TAKEN for one in found)
    if criteria.references == (AUTO,) and not is_taken and not errors:
        errors = [no_winner(kind, criteria, found)]
    return Explanation(
        kind=kind,
        criteria=criteria,
        verdicts=tuple(one for one in found if one.target),
        error="\n".join(dict.fromkeys(errors)),
    )
