"""Measure how fast the lab's simulator is.

Method: one process, one core, the policy fcfs, `max_num_seqs` 256, 2,048 tokens per step, 60,000
blocks, the step-time model "linear". Times are CPU times of the process, excluding the creation of
the workload; each case runs --repeats times, and the best and the median are printed.

- plain: the first requests of the trace azure:conv at 8 requests/s (about 46 requests per step);
  every step is planned. A request-step is one request in one step; the result is request-steps per
  second.
- macro: the same trace at 0.2 requests/s, where stretches of decoding are computed at once.
  Requests per second, with and without prefix caching.
- million: a million requests with the mean lengths of azure:conv (log-normal) at 0.2 requests/s,
  without prefix caching, in a separate process; its wall time and peak memory.

    python bench/lab_speed.py [--repeats 3] [--million 1000000] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

from dovetail.interfaces import SchedulerLimits
from dovetail_lab.simulation.results import NEVER
from dovetail_lab.simulation.setup import EngineSetup
from dovetail_lab.simulation.simulate import simulate
from dovetail_lab.step_times.linear import make_linear
from dovetail_lab.workloads.building import build_workload
from dovetail_lab.workloads.spec import Component, WorkloadSpec
from dovetail_lab.workloads.workload import Workload

LIGHT_RATE, BUSY_RATE = 0.2, 8.0
MAX_MODEL_LEN = 32_768
TRACE = {"trace": "azure:conv"}
SYNTHETIC = {
    "mix": (Component(name="conv", prompt_tokens=1155, prompt_cv=0.95, output_tokens=211),)
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run: requests and request-steps per second of CPU time, and the mean batch."""

    requests_per_s: float
    request_steps_per_s: float
    mean_batch: float


def make_workload(source: dict[str, object], num_requests: int, rate: float) -> Workload:
    """Return a workload; the same arguments give the same requests."""
    spec = WorkloadSpec(num_requests=num_requests, **source)
    built = build_workload(spec, rate=rate, seed=0, num_seeds=1, max_model_len=MAX_MODEL_LEN)
    return built.workload


def make_setup(*, caching: bool) -> EngineSetup:
    """Return the engine of all cases."""
    limits = SchedulerLimits(
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=caching,
    )
    return EngineSetup(scheduler="fcfs", limits=limits, num_blocks=60_000)


def run(workload: Workload, *, macro_steps: bool, caching: bool) -> Measured:
    """Simulate once. Raises RuntimeError if the run fails or a request has not finished."""
    setup, step_times = make_setup(caching=caching), make_linear("linear")
    begun_s = time.process_time()
    result = simulate(workload, setup, step_times, macro_steps=macro_steps, record_steps=False)
    cpu_s = time.process_time() - begun_s
    if result.error or NEVER in result.requests.finished_ns:
        raise RuntimeError(result.error or "a request has not finished")
    return Measured(
        requests_per_s=len(workload.requests) / cpu_s,
        request_steps_per_s=result.num_request_steps / cpu_s,
        mean_batch=result.num_request_steps / result.num_steps,
    )


def print_case(name: str, values: list[float], unit: str) -> dict[str, object]:
    """Print the best and the median; return both."""
    best, median = max(values), statistics.median(values)
    print(f"{name:42} best {best:12,.0f}   median {median:12,.0f} {unit}", flush=True)
    return {"case": name, "best": best, "median": median, "unit": unit}


def run_million(num_requests: int) -> None:
    """Run the long case and print its results as JSON."""
    begun_s = time.perf_counter()
    workload = make_workload(SYNTHETIC, num_requests, LIGHT_RATE)
    built_s = time.perf_counter() - begun_s
    run(workload, macro_steps=True, caching=False)
    total_s = time.perf_counter() - begun_s
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"built_s": built_s, "total_s": total_s, "peak_mib": peak_kib / 1024}))


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--million", type=int, default=1_000_000, help="requests; 0 omits the case")
    parser.add_argument("--only-million", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    if options.only_million:
        run_million(options.million)
        return
    cases = []
    busy = make_workload(TRACE, 2000, BUSY_RATE)
    runs = [run(busy, macro_steps=False, caching=True) for _ in range(options.repeats)]
    name = f"plain, {runs[0].mean_batch:.0f} requests per step"
    cases.append(print_case(name, [r.request_steps_per_s for r in runs], "request-steps/s"))
    light = make_workload(TRACE, 4000, LIGHT_RATE)
    for caching in (True, False):
        runs = [run(light, macro_steps=True, caching=caching) for _ in range(options.repeats)]
        name = f"macro, prefix caching {'on' if caching else 'off'}"
        cases.append(print_case(name, [r.requests_per_s for r in runs], "requests/s"))
    if options.million:
        command = [sys.executable, __file__, "--only-million", f"--million={options.million}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        figures = json.loads(done.stdout)
        print(
            f"{options.million:,} requests: {figures['total_s']:.0f} s of wall time "
            f"({figures['built_s']:.0f} s to build them), {figures['peak_mib']:,.0f} MiB"
        )
        cases.append({"case": "million", "num_requests": options.million, **figures})
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": platform.processor(), "cases": cases}, file, indent=1)


if __name__ == "__main__":
    main()
