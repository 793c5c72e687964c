"""Measure the CPU time of the server per streamed token, with an engine that costs nothing.

Method. `dovetail serve` runs with a worker that answers immediately, so that its own process does
only the work of a server: HTTP, detokenization, events. N clients in this process send one streamed
chat request each and read all events. The figure is the user and system time of the server's
process (without the engine's process and without the clients) between the first request and the
last event, divided by the number of streamed tokens: the median of the runs. If the server is
slower than the engine, several tokens share one event; the number of events per token is printed.

With several API processes, the time of all of them and of the main process counts.

    python bench/server_cost.py [--streams N] [--tokens N] [--repeats R] [--api-processes N]
        [--json FILE]
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
from pathlib import Path

TARGET_US = 25.0
WARM_UP_STREAMS = 64
_READY = re.compile(r"http://([\d.]+):(\d+)/v1")
_MAIN = "import sys; from dovetail.cli.app import main; sys.exit(main())"


def start(streams: int, api_processes: int) -> tuple[subprocess.Popen[str], str, int]:
    """Start a server; return its process, host and port."""
    options = {
        "--model": "demo",
        "--port": "0",
        "--api-processes": str(api_processes),
        "--platform": "dovetail_devkit.fakes.platform:FakePlatform",
        "--worker-cls": "dovetail_devkit.executor.null_executor:NullWorker",
        "--max-num-seqs": str(streams),
        "--max-num-batched-tokens": str(streams * 8),
    }
    flat = [word for pair in options.items() for word in pair]
    process = subprocess.Popen(
        [sys.executable, "-c", _MAIN, "serve", *flat], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if found := _READY.search(line):
            return process, found[1], int(found[2])
    raise SystemExit("the server did not start")


def server_processes(pid: int) -> list[int]:
    """Return the main process and its API processes."""
    found = [pid]
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            if "dovetail_server.processes" in Path(f"/proc/{child}/cmdline").read_text():
                found.append(int(child))
    return found


def cpu_seconds(pids: list[int]) -> float:
    """Return the user and system time of processes, without their children."""
    return sum(_cpu_seconds(pid) for pid in pids)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def stream(host: str, port: int, num_tokens: int) -> int:
    """Read one streamed answer; return the number of its events with text."""
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


async def run(host: str, port: int, streams: int, num_tokens: int) -> int:
    """Read all streams at the same time; return the number of their events with text."""
    return sum(await asyncio.gather(*(stream(host, port, num_tokens) for _ in range(streams))))


def main() -> None:
    """Measure and print the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--api-processes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    process, host, port = start(given.streams, given.api_processes)
    costs, shares = [], []
    try:
        pids = server_processes(process.pid)
        asyncio.run(run(host, port, min(WARM_UP_STREAMS, given.streams), given.tokens))
        for _ in range(given.repeats):
            before = cpu_seconds(pids)
            events = asyncio.run(run(host, port, given.streams, given.tokens))
            used = cpu_seconds(pids) - before
            costs.append(used * 1e6 / (given.streams * given.tokens))
            shares.append(events / (given.streams * given.tokens))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    median = statistics.median(costs)
    print(
        f"{given.streams} streams of {given.tokens} tokens: {median:.1f} µs of CPU time per token"
    )
    print(f"events per token: {statistics.median(shares):.2f}")
    print(f"runs: {', '.join(f'{one:.1f}' for one in costs)}; target: at most {TARGET_US:g}")
    if given.json:
        given.json.write_text(json.dumps({"median_us": median, "runs_us": costs}) + "\n")


if __name__ == "__main__":
    main()
