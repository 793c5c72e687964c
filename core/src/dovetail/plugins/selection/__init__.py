"""Selection: decides which plugin of each kind an engine uses, and states the reasons.

`evaluate` yields a verdict on each candidate. `select` and the `choose` functions return the
selected plugin, and `explain` lists all verdicts.
"""

from dovetail.plugins.selection.choosing import (
    choose,
    choose_attention,
    choose_inner,
    choose_platform,
    choose_scheduler,
    prepare_platform,
    select,
)
from dovetail.plugins.selection.evaluation import evaluate
from dovetail.plugins.selection.explanation import Explanation, explain
from dovetail.plugins.selection.rules import attention_refusals
from dovetail.plugins.selection.verdict import (
    AUTO,
    FAILED,
    NOT_TRIED,
    REJECTED,
    SELECTED,
    UNKNOWN,
    USABLE,
    Criteria,
    Verdict,
)

__all__ = [
    "AUTO",
    "FAILED",
    "NOT_TRIED",
    "REJECTED",
    "SELECTED",
    "UNKNOWN",
    "USABLE",
    "Criteria",
    "Explanation",
    "Verdict",
    "attention_refusals",
    "choose",
    "choose_attention",
    "choose_inner",
    "choose_platform",
    "choose_scheduler",
    "evaluate",
    "explain",
    "prepare_platform",
    "select",
]
