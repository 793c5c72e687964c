"""The ten tasks of the demo model, by name.

Contract: `TASKS` maps a name to its task, in the order of the model card. All tasks are
deterministic for a given seed. They do not depend on the model: a task can grade any text.
"""

from __future__ import annotations

from dovetail_demo_model.list_tasks import COUNT, REVERSE, SORT, SPELL
from dovetail_demo_model.number_tasks import DIFFERENCE, NUMBER_WORDS, SUM, UNIT_CONVERSION
from dovetail_demo_model.record_tasks import CALENDAR, JSON
from dovetail_demo_model.task import HELD_OUT_SHARE, Task, held_out_set

__all__ = ["HELD_OUT_SHARE", "TASKS", "Task", "held_out_set"]

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        SUM,
        DIFFERENCE,
        SORT,
        REVERSE,
        SPELL,
        COUNT,
        CALENDAR,
        NUMBER_WORDS,
        UNIT_CONVERSION,
        JSON,
    )
}
