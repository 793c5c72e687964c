"""Draw the plots of docs/quantization.md from results: accuracy and size, accuracy and speed.

    python bench/quality_plots.py --quality quality.json [--speed cpu_vs.json] --out FOLDER

writes FOLDER/accuracy_size.png and, with the results of a speed run (`cpu_vs.py --json`) on the
same model, FOLDER/accuracy_speed.png. The script needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers.accuracy import NAMES
from peers.tables import medians
from quality.report import plot, plot_speed
from quality.results import ResultsError, read


def main() -> None:
    """Read the results and draw the plots."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quality", type=Path, required=True, help="JSON file of quality.py")
    parser.add_argument("--speed", type=Path, help="JSON file of cpu_vs.py for the same model")
    parser.add_argument("--out", type=Path, required=True, help="directory of the plots")
    args = parser.parse_args()
    result = read(args.quality)
    args.out.mkdir(parents=True, exist_ok=True)
    plot(result, args.out / "accuracy_size.png")
    if args.speed is not None:
        (race,) = json.loads(args.speed.read_text("utf-8"))["results"]
        plot_speed(result, speeds(race), args.out / "accuracy_speed.png")


def speeds(race: Mapping[str, Any]) -> dict[str, float]:
    """Return, for each format of `quality.py`, the tokens per second of one request."""
    result = {}
    for (engine, weights), name in NAMES.items():
        rate = medians(race, weights, "decode1").get(engine)
        if rate is not None:
            result[name] = rate
    return result


if __name__ == "__main__":
    try:
        main()
    except (ResultsError, OSError, ValueError) as error:
        raise SystemExit(f"quality_plots: {error}") from None
