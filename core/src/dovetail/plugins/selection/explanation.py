"""Explains a selection: the verdict on every candidate, with every reason.

The verdicts are the same as those of an engine (`evaluate`). An explanation changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dovetail.plugins.registry import PluginRegistry
from dovetail.plugins.selection.evaluation import evaluate, no_winner
from dovetail.plugins.selection.verdict import AUTO, SELECTED, Criteria, Verdict


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The selected plugins of one kind, and the reasons.

    verdicts: on the candidates in the order to try them, then on plugins that are not tried. error:
    why no plugin is selected; "" if one is selected or none is requested.
    """

    kind: str
    criteria: Criteria
    verdicts: tuple[Verdict, ...]
    error: str = ""

    @property
    def chosen(self) -> tuple[Verdict, ...]:
        """The verdicts on the selected plugins."""
        return tuple(verdict for verdict in self.verdicts if verdict.state == SELECTED)

    def with_state(self, state: str, *reasons: str) -> Explanation:
        """Return a copy that replaces the state of the selected plugins and adds `reasons`."""
        verdicts = tuple(
            replace(verdict, state=state, reasons=(*verdict.reasons, *reasons))
            if verdict.state == SELECTED
            else verdict
            for verdict in self.verdicts
        )
        return replace(self, verdicts=verdicts)


def explain(registry: PluginRegistry, kind: str, criteria: Criteria) -> Explanation:
    """Return a verdict on every plugin of `kind`. Raise PluginNotFoundError for an unknown kind.

    registry: bound to the platform, unless `kind` is "platform".
    """
    verdicts = tuple(evaluate(registry, kind, criteria))
    errors = [str(item.error) for item in verdicts if item.is_fatal]
    is_taken = any(item.state == SELECTED for item in verdicts)
    if criteria.references == (AUTO,) and not is_taken and not errors:
        errors = [no_winner(kind, criteria, verdicts)]
    return Explanation(
        kind=kind,
        criteria=criteria,
        verdicts=tuple(item for item in verdicts if item.target),
        error="\n".join(dict.fromkeys(errors)),
    )
