"""Compare the results of `dovetail bench serve` with those of guidellm for the same load.

Method. The server of `server_cost.py` (a worker without a model, paced steps) is measured by both
programs in turn, in each round: requests at a constant rate, with the same number of requests, and
the same lengths of prompts and outputs. For each program, the script prints the p50 of TTFT and ITL
(medians over the rounds), and then the ratios of the two programs. The exit code is 1 if a ratio is
not within MAX_DIFFERENCE of 1.

With `--streams` the load is a closed loop instead. Its TTFT is not comparable: a client that sends
its next request right after a step has ended waits for nearly the whole next step, but a client
that pauses some milliseconds between two requests waits for a shorter part of that step.

guidellm reports 1 to 2 ms more per TTFT in an open loop (4.8 instead of 3.9 ms with `--step-ms 1`),
which is the time that its client takes. With steps of 50 ms, as for a model with a few billion
parameters, this is a small part of the result.

guidellm needs its own environment, because it depends on other versions of shared packages:

    python -m venv ENV && ENV/bin/pip install torch==2.13.0 && ENV/bin/pip install guidellm==0.8.1
    python bench/load_vs_guidellm.py --guidellm ENV/bin/guidellm [--rounds R]
        [--rate R | --streams N] [--requests N] [--input-len N] [--output-len N] [--step-ms MS]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from server_cost import Server, start

MAX_DIFFERENCE = 0.05
TIMEOUT_S = 600
_MAIN = "import sys; from dovetail.cli.app import main; sys.exit(main())"
_NAMES = {"ttft": "time_to_first_token_ms", "itl": "inter_token_latency_ms"}

Measurements = dict[str, float]
"""The p50 of TTFT and ITL in milliseconds."""


def measure_dovetail(
    server: Server, args: argparse.Namespace, seed: int, folder: Path
) -> Measurements:
    """Return the results of `dovetail bench serve`."""
    file = folder / "dovetail.json"
    _run(
        [
            *(sys.executable, "-c", _MAIN, "bench", "serve"),
            *("--url", f"http://{server.host}:{server.port}", "--json", str(file)),
            *(
                ("--concurrency", str(args.streams))
                if args.streams
                else ("--request-rate", str(args.rate), "--arrivals", "constant")
            ),
            *("--num-prompts", str(args.requests)),
            *("--input-len", str(args.input_len), "--output-len", str(args.output_len)),
            *("--seed", str(seed)),
        ]
    )
    (point,) = json.loads(file.read_text("utf-8"))["points"]
    assert point["num_ok"] == args.requests, point["errors"]
    return {name: point["latencies_ms"][name]["p50"] for name in _NAMES}


def measure_guidellm(
    server: Server, args: argparse.Namespace, seed: int, folder: Path
) -> Measurements:
    """Return the results of guidellm."""
    file, url = folder / "guidellm.json", f"http://{server.host}:{server.port}"
    sizes = f"prompt_tokens={args.input_len},output_tokens={args.output_len}"
    _run(
        [
            *(str(args.guidellm), "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={url},model=demo,"
              "request_format=/v1/completions"),
            "--profile",
            f"kind=concurrent,streams={args.streams}"
            if args.streams
            else f"kind=constant,rate={args.rate}",
            *("--constraint", f"kind=max_requests,count={args.requests}"),
            *("--tokenizer", f"kind=hf_auto,model={_tokenizer()}"),
            *("--data", f"kind=synthetic_text,{sizes}"),
            *("--seed", f"kind=static,value={seed}", "--output", f"kind=json,path={file}"),
        ]
    )  # fmt: skip
    (benchmark,) = json.loads(file.read_text("utf-8"))["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]  # guidellm may end an open loop one request early
    assert totals["errored"] == 0 and totals["successful"] >= args.requests - 1, totals
    return {name: metrics[key]["successful"]["percentiles"]["p50"] for name, key in _NAMES.items()}


PROGRAMS: dict[str, Callable[[Server, argparse.Namespace, int, Path], Measurements]] = {
    "dovetail": measure_dovetail,
    "guidellm": measure_guidellm,
}


def _run(command: list[str]) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _tokenizer() -> Path:
    """Return the directory of the demo model, whose tokenizer the server uses."""
    spec = find_spec("dovetail_demo_model")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).with_name("model")


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--guidellm", type=Path, required=True, help="the program guidellm")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=7.3, help="requests per second")
    parser.add_argument("--streams", type=int, help="closed loop with this number of streams")
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure_all(args: argparse.Namespace) -> dict[str, list[Measurements]]:
    """Measure both programs in turn. Return the results of each round by program."""
    measurements: dict[str, list[Measurements]] = {name: [] for name in PROGRAMS}
    server = start(max(64, args.streams or 0), 1, args.step_ms)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for seed, (name, measure) in product(range(args.rounds), PROGRAMS.items()):
                measurements[name].append(measure(server, args, seed, Path(folder)))
                print(
                    f"round {seed}, {name}: {measurements[name][-1]}", file=sys.stderr, flush=True
                )
    finally:
        server.process.terminate()
        server.process.wait(60)
    return measurements


def main() -> int:
    """Measure and print the results."""
    args = parse()
    measurements = measure_all(args)
    is_within = True
    load = f"{args.streams} streams" if args.streams else f"{args.rate:g} requests/s"
    print(f"{load}, {args.requests} requests, {args.step_ms:g} ms per step")
    for latency in _NAMES:
        runs = {name: [item[latency] for item in items] for name, items in measurements.items()}
        medians = {name: statistics.median(values) for name, values in runs.items()}
        ratio = medians["dovetail"] / medians["guidellm"]
        is_within = is_within and abs(ratio - 1) <= MAX_DIFFERENCE
        spreads = ", ".join(
            f"{name} {medians[name]:.2f} ms ({min(values):.2f}–{max(values):.2f})"
            for name, values in runs.items()
        )
        print(f"{latency.upper()} p50: {spreads}, ratio {ratio:.3f}")
    print(f"limit: within {MAX_DIFFERENCE:.0%}")
    if args.json:
        args.json.write_text(json.dumps(measurements, indent=1) + "\n", "utf-8")
    return 0 if is_within else 1


if __name__ == "__main__":
    raise SystemExit(main())
