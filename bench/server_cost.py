"""Measure the CPU time of the server per streamed token, with an engine that responds immediately.

Method. `dovetail serve` runs with a worker without a model, so that its own process does only the
work of a server: HTTP, detokenization, events. N clients in this process send one streamed chat
request each and read all events. The result is the user and system time of the server's process
(without the engine's process and without the clients) between the first request and the last event,
divided by the number of streamed tokens: the median of the runs.

Each step of the worker takes `--step-ms`. If the server and the clients need more than this time
for a step, several tokens share one event; the number of events per token is printed. A result is
only valid for single tokens if this number is about 1. With 0 the worker answers immediately.

With several API processes, the time of all of them and of the main process counts.

    python bench/server_cost.py [--streams N] [--tokens N] [--repeats R] [--step-ms MS]
        [--api-processes N,N] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from dovetail.plan import SchedulerOutput
from dovetail_devkit.executor.null_executor import NullWorker

TARGET_US = 25.0
MAX_RISE = 0.10
"""Target for the CPU time per token with several API processes, relative to one."""
STEP_VARIABLE = "SERVER_COST_STEP_MS"
WARM_UP_STREAMS = 64
_READY = re.compile(r"http://([\d.]+):(\d+)/v1")
_MAIN = "import sys; from dovetail.cli.app import main; sys.exit(main())"


class PacedWorker(NullWorker):
    """A worker without a model whose steps take a given time."""

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Sleep for the time of a step, and keep the plan."""
        time.sleep(float(os.environ[STEP_VARIABLE]) / 1e3)
        super().execute_model(plan)


@dataclass
class Server:
    """A running server. pids: process ids of its main process and its API processes."""

    process: subprocess.Popen[str]
    host: str
    port: int
    pids: list[int]


def start(streams: int, api_processes: int, step_ms: float) -> Server:
    """Start a server."""
    options = {
        "--model": "demo",
        "--port": "0",
        "--api-processes": str(api_processes),
        "--platform": "dovetail_devkit.fakes.platform:FakePlatform",
        "--worker-cls": "server_cost:PacedWorker",
        "--max-num-seqs": str(streams),
        "--max-num-batched-tokens": str(streams * 8),
    }
    flat = [word for pair in options.items() for word in pair]
    process = subprocess.Popen(
        [sys.executable, "-c", _MAIN, "serve", *flat],
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).resolve().parent),
            STEP_VARIABLE: str(step_ms),
        },
    )
    assert process.stderr is not None
    for line in process.stderr:
        if match := _READY.search(line):
            return Server(process, match[1], int(match[2]), server_processes(process.pid))
    raise SystemExit("the server did not start")


def server_processes(pid: int) -> list[int]:
    """Return the main process and its API processes."""
    actual = [pid]
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            if "dovetail_server.processes" in Path(f"/proc/{child}/cmdline").read_text():
                actual.append(int(child))
    return actual


def cpu_seconds(pids: list[int]) -> float:
    """Return the user and system time of processes, without their children."""
    return sum(_cpu_seconds(pid) for pid in pids)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def stream(host: str, port: int, num_tokens: int) -> int:
    """Read one streamed response. Return the number of its events with text."""
    messages = [{"role": "user", "content": "Count."}]
    fields = {"messages": messages, "stream": True, "max_tokens": num_tokens, "ignore_eos": True}
    body = json.dumps(fields).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    more = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write((head + more).encode() + body)
    received = await reader.read()
    assert b"[DONE]" in received and b'"error"' not in received, received[:500]
    writer.close()
    return received.count(b'"content":"') - 1  # the first event has the role only


async def stream_forever(server: Server, first_tokens: int, num_tokens: int) -> None:
    """Read streams one after another, the first with `first_tokens`, until cancelled."""
    while True:
        await stream(server.host, server.port, first_tokens)
        first_tokens = num_tokens


async def run(host: str, port: int, streams: int, num_tokens: int) -> int:
    """Read all streams at the same time. Return the number of their events with text."""
    return sum(await asyncio.gather(*(stream(host, port, num_tokens) for _ in range(streams))))


@dataclass
class Costs:
    """The µs and events per token of each run with a given number of API processes."""

    us: list[float]
    events: list[float]


def measure(server: Server, arguments: argparse.Namespace, costs: Costs) -> None:
    """Add one run."""
    before = cpu_seconds(server.pids)
    events = asyncio.run(run(server.host, server.port, arguments.streams, arguments.tokens))
    num_tokens = arguments.streams * arguments.tokens
    costs.us.append((cpu_seconds(server.pids) - before) * 1e6 / num_tokens)
    costs.events.append(events / num_tokens)


def measure_all(kwargs: argparse.Namespace) -> dict[int, Costs]:
    """Measure each number of API processes in turn. Return the costs by number."""
    servers = {n: start(kwargs.streams, n, kwargs.step_ms) for n in kwargs.api_processes}
    costs = {n: Costs([], []) for n in servers}
    try:
        for server in servers.values():
            warm_up = min(WARM_UP_STREAMS, kwargs.streams)
            asyncio.run(run(server.host, server.port, warm_up, kwargs.tokens))
        for _ in range(kwargs.repeats):
            for number, server in servers.items():
                measure(server, kwargs, costs[number])
    finally:
        for server in servers.values():
            server.process.send_signal(signal.SIGTERM)
        for server in servers.values():
            server.process.wait(60)
    return costs


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=150.0)
    parser.add_argument("--api-processes", default="1", help="numbers, separated by commas")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.api_processes = [int(item) for item in args.api_processes.split(",")]
    actual = measure_all(args)
    rows = [
        {
            "api_processes": n,
            "us": statistics.median(item.us),
            "runs_us": item.us,
            "events_per_token": statistics.median(item.events),
        }
        for n, item in actual.items()
    ]
    print(f"{args.streams} streams of {args.tokens} tokens, {args.step_ms:g} ms per step")
    for row in rows:
        runs = ", ".join(f"{item:.1f}" for item in row["runs_us"])
        print(
            f"{row['api_processes']} API process(es): {row['us']:.1f} µs of CPU time per token"
            f" ({runs}), {row['events_per_token']:.2f} events per token,"
            f" {row['us'] / rows[0]['us']:.2f} x the first row"
        )
    print(f"targets: {TARGET_US:g} µs with one; at most {1 + MAX_RISE:g} x with several")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
