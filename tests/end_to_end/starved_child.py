"""A process that starts engines under resource limits.

It imports all modules, then forks for each job.

Run as `python starved_child.py`: stdin holds a JSON list of jobs; each outcome is one line of JSON.
A job: name, model, options; limits in addition to current usage (`address_space`, `open_files`) or
absolute (`file_size`); `ring`, the bytes of a ring to create and use instead of an engine;
`imports`, whether the parent starts this engine without limits before it forks, which imports the
modules that the engine needs. An outcome: name, error (its class; "" for success), message,
is_ours, warnings, seconds, status (of the forked process).
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
import time
from typing import Any

import torch

from dovetail import LLM, SamplingParams
from dovetail.errors import DovetailError
from dovetail.transport.ring import make_ring
from dovetail.transport.ring_memory import RingShape

SECONDS = 30


class Warnings(logging.Handler):
    """Keeps log messages of level WARNING and above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message of a record."""
        self.messages.append(record.getMessage())


def limit(job: dict[str, Any]) -> None:
    """Apply the limits of the job to this process."""
    if "address_space" in job:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        maximum = used + job["address_space"]
        resource.setrlimit(resource.RLIMIT_AS, (maximum, maximum))
    if "open_files" in job:
        maximum = len(os.listdir("/proc/self/fd")) - 1 + job["open_files"]
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
    if "file_size" in job:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_size"],) * 2)


def start(job: dict[str, Any]) -> None:
    """Start an engine and generate text."""
    with LLM(job["model"], **job["options"]) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        llm.generate([[5, 6, 7]], params, use_tqdm=False)


def use_ring(num_bytes: int) -> None:
    """Send a frame that fills a slot of a new ring, and receive it."""
    writer, (index,) = make_ring(RingShape(num_readers=1, num_slots=2, slot_bytes=num_bytes // 2))
    reader = index.take()
    frame = b"x" * (num_bytes // 2)
    writer.send(frame)
    assert reader.receive(timeout_s=5) == frame
    reader.close()
    writer.close()


def attempt(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job under its resource limits and return the outcome."""
    warnings = Warnings()
    logging.getLogger().addHandler(warnings)
    outcome: dict[str, Any] = {"error": "", "message": "", "is_ours": True}
    try:
        limit(job)
        use_ring(job["ring"]) if "ring" in job else start(job)
    except Exception as error:
        outcome = {
            "error": type(error).__name__,
            "message": str(error),
            "is_ours": isinstance(error, DovetailError),
        }
    return outcome | {"warnings": warnings.messages}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a forked process. A crash of that process is an outcome, too."""
    begin = time.monotonic()
    own, other = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(SECONDS)
        try:
            os.write(other, json.dumps(attempt(job)).encode())
        finally:
            os._exit(0)
    os.close(other)
    with os.fdopen(own, "rb") as response:
        text = response.read()
    _, status = os.waitpid(child, 0)
    nothing = {"error": "no outcome was written", "message": "", "is_ours": False, "warnings": []}
    return {
        "name": job["name"],
        **(json.loads(text) if text else nothing),
        "seconds": time.monotonic() - begin,
        "status": os.waitstatus_to_exitcode(status),
    }


def main() -> None:
    """Run all jobs from stdin in order."""
    jobs = json.load(sys.stdin)
    torch.set_num_threads(1)  # a process that forks must have one thread
    for job in jobs:
        if job.get("imports"):
            start(job)
    for job in jobs:
        print(json.dumps(run(job)), flush=True)


if __name__ == "__main__":
    main()
