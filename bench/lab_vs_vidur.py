"""Compare the simulator with Vidur: the same trace, the same step times, in one run.

Method: requests of azure:conv at a rate, `max_num_seqs` 128, blocks of 16 tokens and the step-time
model "linear". Vidur runs its Sarathi scheduler with chunks of 2,048 tokens; that is fcfs with
2,048 tokens per step in Dovetail. Vidur gets a predictor with the same constants instead of its
own, so that only scheduling differs; its metrics are disabled. The script prints requests per
second of CPU time (excluding imports, metrics and the creation of the workload), and the mean TTFT
and end-to-end latency, which show whether the schedules are similar.

    python bench/lab_vs_vidur.py --vidur CHECKOUT --python INTERPRETER [--repeats 3]
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from dovetail.interfaces import SchedulerLimits
from dovetail_lab.simulation.results import NEVER
from dovetail_lab.simulation.setup import EngineSetup
from dovetail_lab.simulation.simulate import simulate
from dovetail_lab.step_times.linear import DEFAULTS, make_linear
from dovetail_lab.workloads.building import build_workload
from dovetail_lab.workloads.spec import WorkloadSpec
from dovetail_lab.workloads.workload import Workload

CHILD = Path(__file__).with_name("peers") / "vidur_run.py"
BATCH_SIZE, CHUNK, NUM_BLOCKS = 128, 2048, 32_768
STEP_TIMES = make_linear("linear:context_pair_ps=0")
MAX_MODEL_LEN = 16_384


def run_own(workload: Workload, *, macro_steps: bool) -> dict[str, float]:
    """Simulate with Dovetail. Return its results."""
    setup = EngineSetup(
        scheduler="fcfs",
        limits=SchedulerLimits(
            max_num_seqs=BATCH_SIZE,
            max_num_batched_tokens=CHUNK,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=False,
        ),
        num_blocks=NUM_BLOCKS + 1,
    )
    begun_s = time.process_time()
    result = simulate(workload, setup, STEP_TIMES, macro_steps=macro_steps, record_steps=False)
    cpu_s = time.process_time() - begun_s
    columns, count = result.requests, len(workload.requests)
    if result.error or NEVER in columns.finished_ns:
        raise RuntimeError(result.error or "a request has not finished")

    def mean_s(times_ns: object) -> float:
        pairs = zip(times_ns, columns.arrival_ns, strict=True)
        return sum(after - before for after, before in pairs) / count / 1e9

    ttft_s, e2e_s = mean_s(columns.first_token_ns), mean_s(columns.last_token_ns)
    return {"cpu_s": cpu_s, "ttft_s": ttft_s, "e2e_s": e2e_s, "num_requests": count}


def run_vidur(workload: Workload, checkout: Path, python: Path) -> dict[str, float]:
    """Simulate with Vidur in a separate process. Return its results."""
    constants = {
        name: DEFAULTS[f"{name}_ps"] / 1e12
        for name in ("step", "prefill_token", "decode", "kv_token")
    }
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.csv"
        with trace.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("arrived_at", "num_prefill_tokens", "num_decode_tokens"))
            for item in workload.requests:
                writer.writerow(
                    (item.arrival_ns / 1e9, item.num_prompt_tokens, item.num_output_tokens)
                )
        sizes = [str(number) for number in (BATCH_SIZE, CHUNK, NUM_BLOCKS)]
        done = subprocess.run(
            [python, CHILD, trace, *sizes, json.dumps(constants)],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            check=True,
            capture_output=True,
            text=True,
        )
    (line,) = (text for text in done.stdout.splitlines() if text.startswith("{"))
    figures: dict[str, float] = json.loads(line)
    return figures


def main() -> None:
    """Run both simulators at two rates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vidur", type=Path, required=True)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    spec = WorkloadSpec(trace="azure:conv", num_requests=options.requests)
    print("rate  simulator        requests/s of CPU   ratio   mean TTFT (s)   mean E2E (s)")
    for rate in (0.5, 8.0):
        workload = build_workload(
            spec, rate=rate, seed=0, num_seeds=1, max_model_len=MAX_MODEL_LEN
        ).workload
        runs: dict[str, list[dict[str, float]]] = {"Vidur": [], "Dovetail": []}
        for _ in range(options.repeats):
            runs["Vidur"].append(run_vidur(workload, options.vidur, options.python))
            runs["Dovetail"].append(run_own(workload, macro_steps=True))
        speeds = {
            name: statistics.median(item["num_requests"] / item["cpu_s"] for item in figures)
            for name, figures in runs.items()
        }
        for name, figures in runs.items():
            ratio = speeds[name] / speeds["Vidur"]
            last = figures[-1]
            print(
                f"{rate:4g}  {name:12} {speeds[name]:18,.0f} {ratio:9.2f} "
                f"{last['ttft_s']:13.4f} {last['e2e_s']:14.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
