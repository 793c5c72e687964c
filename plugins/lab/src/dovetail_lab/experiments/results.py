"""The results of an experiment: its runs, by policy, load, seed and engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dovetail.errors import UserError
from dovetail_lab.experiments.metric_table import METRICS
from dovetail_lab.experiments.run_files import RunFolder, RunRecord
from dovetail_lab.experiments.spec import ExperimentSpec

if TYPE_CHECKING:
    import pandas

    from dovetail_lab.experiments.comparison import Comparison


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The runs of one policy at one load, one per seed."""

    engine: str
    policy: str
    load: float


@dataclass(kw_only=True)
class Results:
    """The runs of an experiment.

    capacity: requests per second of the baseline's bursts, mean over seeds. records: all runs,
    failed ones too. folder: the files of the runs. num_reused: runs that were in the directory
    before. comparisons: cache of `comparison.compare_all`.
    """

    spec: ExperimentSpec
    capacity: float
    records: Sequence[RunRecord]
    folder: RunFolder
    num_reused: int = 0
    comparisons: dict[tuple[str, str], list[Comparison]] = field(default_factory=dict, repr=False)

    @property
    def baseline(self) -> str:
        """The name of the first policy."""
        return self.spec.policies[0].name

    @property
    def policies(self) -> list[str]:
        """The names of the policies, in the order of the experiment."""
        return [policy.name for policy in self.spec.policies]

    @cached_property
    def by_cell(self) -> Mapping[Cell, Mapping[int, RunRecord]]:
        """The complete runs of each cell, by seed."""
        cells: dict[Cell, dict[int, RunRecord]] = {}
        for record in self.records:
            key = record.key
            if record.ok:
                cell = Cell(engine=key.engine, policy=key.policy, load=key.load)
                cells.setdefault(cell, {})[key.seed] = record
        return cells

    @property
    def failures(self) -> list[RunRecord]:
        """The runs that failed."""
        return [record for record in self.records if not record.ok]

    def values(self, cell: Cell, metric: str) -> dict[int, float]:
        """Return the values of a metric by seed, without runs for which the metric is None.

        Raises UserError, naming policy and metric, for a stored value that is not a finite number:
        policies could not be ranked by it.
        """
        results = {}
        for seed, record in sorted(self.by_cell.get(cell, {}).items()):
            value = record.values.get(metric)
            if value is None:
                continue
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                raise UserError(
                    f"the policy {cell.policy!r} has {metric}={value!r} at load {cell.load:g} with "
                    f"seed {seed}, so policies cannot be ranked by {metric}. Delete the file "
                    f"{self.folder.folder.name}/{record.run_id}.json, and repeat the command."
                )
            results[seed] = value
        return results

    def censored(self, cell: Cell) -> tuple[int, int, int]:
        """Return the numbers of measured, unfinished and failed requests of a cell."""
        runs = self.by_cell.get(cell, {}).values()
        return (
            sum(run.num_measured for run in runs),
            sum(run.num_censored for run in runs),
            sum(run.num_failed for run in runs),
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of a tidy table: one per run and metric, and one per failed run."""
        for record in self.records:
            head: dict[str, Any] = {
                "experiment": self.spec.name,
                **record.key.plain(),
                "run_id": record.run_id,
                "status": record.status,
            }
            values = record.values if record.ok else {"": None}
            for name, value in values.items():
                unit = METRICS[name].unit if name in METRICS else ""
                yield {**head, "metric": name, "unit": unit, "value": value}

    def frame(self) -> pandas.DataFrame:
        """Return the tidy table as a pandas DataFrame. Raise UserError if pandas is missing."""
        try:
            import pandas
        except ImportError as error:
            raise UserError(
                "pandas is not installed. Run: pip install 'dovetail-lab[frame]'."
            ) from error
        return pandas.DataFrame(list(self.rows()))
