"""Writes results as CSV, and as Parquet if pyarrow is installed."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dovetail_lab.experiments.comparison import compare_all
from dovetail_lab.experiments.metric_table import METRICS
from dovetail_lab.experiments.results import Results


def export_results(results: Results, out: Path) -> list[Path]:
    """Write results.csv, differences.csv and, with pyarrow, results.parquet; return the paths."""
    rows = list(results.rows())
    paths = [
        _write_csv(out / "results.csv", rows),
        _write_csv(out / "differences.csv", list(difference_rows(results))),
    ]
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return paths
    parquet = out / "results.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet)
    return [*paths, parquet]


def difference_rows(results: Results) -> Iterable[dict[str, Any]]:
    """Yield one row per comparison with the baseline."""
    for engine in results.spec.engines:
        for metric in METRICS:
            for item in compare_all(results, metric, engine):
                difference = item.difference
                yield {
                    "engine": engine,
                    "load": item.load,
                    "metric": metric,
                    "policy": item.policy,
                    "baseline": item.baseline,
                    "num_pairs": difference.t.num_values,
                    "baseline_mean": difference.left,
                    "policy_mean": difference.right,
                    "difference": difference.t.mean,
                    "t_low": difference.t.low,
                    "t_high": difference.t.high,
                    "bootstrap_low": difference.boot_low,
                    "bootstrap_high": difference.boot_high,
                    "p_value": difference.p_value,
                    "p_adjusted": item.p_adjusted,
                    "verdict": item.verdict,
                }


def _write_csv(path: Path, rows: list[Mapping[str, Any]] | list[dict[str, Any]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        if rows:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return path
