"""Compare the shared-memory ring, a queue and ZMQ for sending plans from one process to readers.

Method: one writer sends plans of N decoding rows, which differ from each other, to R reader
processes. Throughput: the writer encodes and sends; each reader receives and decodes every plan and
responds after the last one. The result is plans per second from the first send to the last
response.
Latency: the writer sends one plan and waits until every reader has confirmed it over a pipe. All
methods use the same pipe and its cost is included, so compare methods, not machines. Methods:
`ring`, with plans as columns; `zmq`, PUB and SUB over a unix socket with the same frames; `queue`,
one `multiprocessing.Queue` per reader with pickled plans. Results are medians of the repeats after
one warm-up; the methods alternate.

    python bench/ring.py [--rows 256] [--readers 2] [--plans 20000] [--repeats 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from array import array
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

from dovetail.plan import SchedulerOutput, StepBuilder
from dovetail.transport.plan_frame import decode_plan, encode_plan
from dovetail.transport.ring import make_ring
from dovetail.transport.ring_memory import RingShape

NUM_DISTINCT = 64
NUM_LATENCIES = 2000
TARGET = 20_000


def make_plans(num_rows: int) -> list[SchedulerOutput]:
    """Return plans of `num_rows` decoding rows. Every sixteenth row gets a block."""
    builder, rows = StepBuilder(), array("i", range(num_rows))
    plans = []
    for step in range(NUM_DISTINCT):
        builder.run_decodes(rows, array("i", [step + row for row in rows]))
        for row in range(step % 16, num_rows, 16):
            builder.grow(row, [row * NUM_DISTINCT + step])
        plans.append(builder.build())
    return plans


class RingWay:
    """Sends plans over the ring. A forked child inherits its file descriptors."""

    def __init__(self, num_readers: int) -> None:
        self._writer, self._places = make_ring(RingShape(num_readers=num_readers))

    def reader(self, index: int) -> Any:
        """Return a function that receives the next plan, in the reader's process."""
        for position in self._places:
            if position.index != index:
                position.close()
        reader = self._places[index].take()
        return lambda: decode_plan(reader.receive(timeout_s=60))

    def writer(self) -> Any:
        """Return a function that sends a plan, in the writer's process."""
        for index in self._places:
            index.close()
        return lambda plan: self._writer.send(encode_plan(plan))

    def close(self) -> None:
        """Release the resources."""
        self._writer.close()


class ZmqWay:
    """Sends plans over PUB and SUB sockets, without the queue limit above which PUB drops plans."""

    def __init__(self, num_readers: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dovetail-")
        self._address = f"ipc://{self._folder.name}/plans"
        self._num_readers = num_readers

    def reader(self, index: int) -> Any:
        """Return a function that receives the next plan, in the reader's process."""
        socket = zmq.Context().socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(self._address)
        return lambda: decode_plan(socket.recv())

    def writer(self) -> Any:
        """Return a function that sends a plan, in the writer's process."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.bind(self._address)
        for _ in range(self._num_readers):
            self._socket.recv()  # a reader has subscribed
        return lambda plan: self._socket.send(encode_plan(plan))

    def close(self) -> None:
        """Release the resources."""
        self._socket.close(linger=0)
        self._context.term()
        self._folder.cleanup()


class QueueWay:
    """Sends plans over one queue per reader, with the capacity of the ring."""

    def __init__(self, num_readers: int) -> None:
        fork = multiprocessing.get_context("fork")
        self._queues = [fork.Queue(16) for _ in range(num_readers)]

    def reader(self, index: int) -> Any:
        """Return a function that receives the next plan, in the reader's process."""
        return self._queues[index].get

    def writer(self) -> Any:
        """Return a function that sends a plan, in the writer's process."""

        def send(plan: SchedulerOutput) -> None:
            for queue in self._queues:
                queue.put(plan)

        return send

    def close(self) -> None:
        """Release the resources."""
        for queue in self._queues:
            queue.close()
            queue.join_thread()


WAYS = {"ring": RingWay, "zmq": ZmqWay, "queue": QueueWay}


def read_plans(way: Any, index: int, pipe: Connection, num_plans: int) -> None:
    """Run a reader: confirm the last plan of the stream, then each single plan."""
    receive = way.reader(index)
    pipe.send_bytes(b"r")
    for _ in range(num_plans):
        plan = receive()
    pipe.send_bytes(plan.step_id.to_bytes(8, "little"))
    for _ in range(NUM_LATENCIES):
        receive()
        pipe.send_bytes(b".")
    os._exit(0)


def run_once(name: str, num_readers: int, plans: list[SchedulerOutput], num: int) -> dict[str, Any]:
    """Return the plans per second, and the microseconds from a send to the last response."""
    way, fork = WAYS[name](num_readers), multiprocessing.get_context("fork")
    pipes, children = [], []
    for index in range(num_readers):
        own, theirs = fork.Pipe()
        child = fork.Process(target=read_plans, args=(way, index, theirs, num), daemon=True)
        child.start()
        pipes.append(own)
        children.append(child)
    send = way.writer()
    for pipe in pipes:
        pipe.recv_bytes()
    start = time.perf_counter()
    for number in range(num):
        send(plans[number % NUM_DISTINCT])
    last = {int.from_bytes(pipe.recv_bytes(), "little") for pipe in pipes}
    rate = num / (time.perf_counter() - start)
    if last != {plans[(num - 1) % NUM_DISTINCT].step_id}:
        raise RuntimeError(f"{name}: the readers stopped after plan {last}")
    latencies = []
    for number in range(NUM_LATENCIES):
        start = time.perf_counter()
        send(plans[number % NUM_DISTINCT])
        for pipe in pipes:
            pipe.recv_bytes()
        latencies.append((time.perf_counter() - start) * 1e6)
    for child in children:
        child.join(10)
    way.close()
    cuts = statistics.quantiles(latencies, n=100)
    return {"plans_s": rate, "median_us": cuts[49], "p99_us": cuts[98]}


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--plans", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=tuple(WAYS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    plans = make_plans(args.rows)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in args.ways}
    for repeat in range(args.repeats + 1):
        for name in args.ways:
            actual = run_once(name, args.readers, plans, args.plans)
            if repeat:
                results[name].append(actual)
    size = len(encode_plan(plans[0]))
    print(f"{args.rows} rows ({size} bytes a frame), {args.readers} readers, {os.cpu_count()} CPUs")
    print(f"{platform.platform()}, Python {platform.python_version()}; median (min to max)")
    for name, actual in results.items():
        rates = [item["plans_s"] for item in actual]
        middle = {key: statistics.median(item[key] for item in actual) for key in actual[0]}
        print(
            f"{name:6} {middle['plans_s']:9,.0f} plans/s ({min(rates):,.0f} to {max(rates):,.0f})"
            f"   to all readers and back {middle['median_us']:6.0f} µs, p99 {middle['p99_us']:6.0f}"
        )
    if args.rows == 256 and args.readers == 2 and "ring" in results:
        reached = statistics.median(item["plans_s"] for item in results["ring"]) >= TARGET
        print(f"target of {TARGET:,} plans/s: {'reached' if reached else 'MISSED'}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
