"""Measure the speed of `dovetail bench serve` and the CPU time of `dovetail top`.

`bench serve`. A server in another process responds at once with fixed bytes: 16 events of one token
each. `dovetail bench serve` sends requests in a closed loop; the result is the number of completed
requests per second, in each of the repeats.

`top`. The server of `server_cost.py` (a worker without a model, paced steps) streams to 256
clients, whose requests finish one after another. `dovetail top` runs in a terminal of 160 × 50
cells with its default interval. The result is the CPU time of its process in percent of a core, in
each of several windows.

The exit code is 1 if a median misses its target.

    python bench/client_tools.py [--repeats R] [--requests N] [--concurrency N] [--streams N]
        [--step-ms MS] [--window-s S]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

from server_cost import Server, cpu_seconds, start, stream_forever

ROOT = Path(__file__).resolve().parents[1]
NULL_SERVER = ROOT / "plugins" / "client_tools" / "tests" / "null_server.py"
MAIN = "import sys; from dovetail.cli.app import main; sys.exit(main())"
OUTPUT_TOKENS = 16
STREAM_TOKENS = 500
WARM_UP_S = 5.0
COLUMNS, LINES = 160, 50
MIN_REQUESTS_PER_S = 1000.0
MAX_TOP_PERCENT = 2.0
MIN_SHOWN = 0.9
"""Minimum share of the streams that `dovetail top` must have shown as running."""
_STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""An escape sequence of a terminal."""


def measure_rates(args: argparse.Namespace) -> list[float]:
    """Return the requests per second of several runs of `dovetail bench serve`."""
    command = [sys.executable, str(NULL_SERVER), str(OUTPUT_TOKENS)]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as server,
    ):
        assert server.stdin is not None and server.stdout is not None
        port = server.stdout.readline().strip()
        rates = [_rate(port, Path(folder) / "load.json", args) for _ in range(args.repeats)]
        server.stdin.close()
    return rates


def _rate(port: str, file: Path, args: argparse.Namespace) -> float:
    command = [
        *(sys.executable, "-c", MAIN, "bench", "serve", "--url", f"http://127.0.0.1:{port}"),
        *("--concurrency", str(args.concurrency), "--num-prompts", str(args.requests)),
        *("--output-len", str(OUTPUT_TOKENS), "--json", str(file)),
    ]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    (point,) = json.loads(file.read_text("utf-8"))["points"]
    assert point["num_ok"] == args.requests, point["errors"]
    return float(point["requests_per_s"])


async def measure_top(server: Server, args: argparse.Namespace) -> list[float]:
    """Return the CPU time of `dovetail top` in several windows, in percent of a core."""
    clients = [
        asyncio.create_task(
            stream_forever(server, 1 + STREAM_TOKENS * index // args.streams, STREAM_TOKENS)
        )
        for index in range(args.streams)
    ]
    windows = []
    with top_in_terminal(f"http://{server.host}:{server.port}") as (process, output):
        await asyncio.sleep(WARM_UP_S)
        loop = asyncio.get_running_loop()
        for _ in range(args.repeats):
            begin_s, used_s = loop.time(), cpu_seconds([process.pid])
            await asyncio.sleep(args.window_s)
            passed_s = loop.time() - begin_s
            windows.append(100 * (cpu_seconds([process.pid]) - used_s) / passed_s)
    shown = re.findall(r"running (\d+)", _STYLE.sub("", output.decode("utf-8", "replace")))
    assert max(map(int, shown)) >= MIN_SHOWN * args.streams, shown
    for client in clients:
        assert not client.done(), client.exception()
        client.cancel()
    return windows


@contextlib.contextmanager
def top_in_terminal(url: str) -> Iterator[tuple[subprocess.Popen[bytes], bytearray]]:
    """Run `dovetail top` in a terminal. Yield its process and what it has written."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "top", "--url", url],
        stdin=theirs,
        stdout=theirs,
        env=os.environ | {"TERM": "xterm-256color"},
    )
    os.close(theirs)
    output = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # the process has ended
            while part := os.read(ours, 1 << 16):
                output.extend(part)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield process, output
    finally:
        os.write(ours, b"q")
        process.wait(60)
        thread.join()
        os.close(ours)


def main() -> int:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=40.0)
    parser.add_argument("--window-s", type=float, default=10.0)
    args = parser.parse_args()
    rates = measure_rates(args)
    server = start(args.streams, 1, args.step_ms)
    try:
        shares = asyncio.run(measure_top(server, args))
    finally:
        server.process.terminate()
        server.process.wait(60)
    rate, share = statistics.median(rates), statistics.median(shares)
    print(
        f"bench serve, {args.concurrency} in flight: {rate:,.0f} requests/s "
        f"({min(rates):,.0f}–{max(rates):,.0f}; at least {MIN_REQUESTS_PER_S:,.0f})"
    )
    print(
        f"top, {args.streams} running requests: {share:.2f} % of a core "
        f"({min(shares):.2f}–{max(shares):.2f}; at most {MAX_TOP_PERCENT:g})"
    )
    return int(rate < MIN_REQUESTS_PER_S or share > MAX_TOP_PERCENT)


if __name__ == "__main__":
    raise SystemExit(main())
