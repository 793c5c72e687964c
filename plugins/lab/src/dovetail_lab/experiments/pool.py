"""Runs jobs in worker processes, one per core, each with a time limit.

If a run exceeds the limit, its process is killed and a new process runs the next job. A failing job
does not affect other jobs.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from dovetail.clock import Clock
from dovetail_lab.experiments.job import Job
from dovetail_lab.experiments.run_files import RunFolder, RunRecord
from dovetail_lab.output_errors import output_errors

COMMAND = (sys.executable, "-m", "dovetail_lab.experiments.worker")
_NS = 1_000_000_000
_STOP_S = 5.0

OnDone = Callable[[RunRecord], None]
"""Called with each finished run."""


class WorkerPool:
    """Processes that run jobs. Use it in a `with` statement, which stops the processes at exit."""

    def __init__(
        self, num_workers: int, clock: Clock, log: Path, *, command: Sequence[str] = COMMAND
    ) -> None:
        """num_workers: number of processes. log: receives their standard error output."""
        self._num_workers = num_workers
        self._clock = clock
        self._command = command
        self._log = log.open("ab")
        self._selector = selectors.DefaultSelector()
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []

    def __enter__(self) -> WorkerPool:
        """Return the pool."""
        return self

    def __exit__(self, *error: object) -> None:
        for worker in (*self._idle, *self._busy):
            worker.stop(kill=worker in self._busy)
        self._selector.close()
        self._log.close()

    def run(self, jobs: Iterable[Job], time_limit_s: float, on_done: OnDone) -> None:
        """Run all jobs, each for at most `time_limit_s`."""
        waiting = deque(jobs)
        limit_ns = round(time_limit_s * _NS)
        while waiting or self._busy:
            while waiting and len(self._busy) < self._num_workers:
                self._start(waiting.popleft())
            for worker in self._ready(limit_ns):
                on_done(self._reply(worker))
            for worker in self._late(limit_ns):
                self._remove(worker, kill=True)
                text = f"the run exceeded the time limit of {time_limit_s:g} s (time_limit_s)"
                on_done(_lost(worker.job, text))

    def _start(self, job: Job) -> None:
        worker = self._idle.pop() if self._idle else _Worker(self._command, self._log)
        worker.start(job, self._clock.now_ns())
        self._busy.append(worker)
        self._selector.register(worker.replies, selectors.EVENT_READ, worker)

    def _ready(self, limit_ns: int) -> list[_Worker]:
        """Wait for replies, exits or the next time limit. Return the workers with a reply."""
        deadline = min(worker.started_ns for worker in self._busy) + limit_ns
        left_s = max(0.0, (deadline - self._clock.now_ns()) / _NS)
        return [key.data for key, _ in self._selector.select(left_s + 0.01)]

    def _late(self, limit_ns: int) -> list[_Worker]:
        now_ns = self._clock.now_ns()
        return [worker for worker in self._busy if now_ns - worker.started_ns >= limit_ns]

    def _reply(self, worker: _Worker) -> RunRecord:
        """Return the record of a worker's job. Afterwards, the worker is idle or has exited."""
        job, alive = worker.job, worker.receive()
        record = RunFolder(Path(job.folder)).read(job.run_id) if alive else None
        if alive:
            self._selector.unregister(worker.replies)
            self._busy.remove(worker)
            self._idle.append(worker)
        else:
            error = worker.exit_text()
            self._remove(worker, kill=True)
            return _lost(job, error)
        return record or _lost(job, "the record of the run cannot be read")

    def _remove(self, worker: _Worker, *, kill: bool) -> None:
        self._selector.unregister(worker.replies)
        self._busy.remove(worker)
        worker.stop(kill=kill)


def _lost(job: Job, error: str) -> RunRecord:
    """Store and return the record of a run that has no result."""
    record = RunRecord(run_id=job.run_id, key=job.key, status="failed", error=error)
    with output_errors("out", Path(job.folder)):
        RunFolder(Path(job.folder)).write(record)
    return record


class _Worker:
    """A process and the job that it runs."""

    job: Job
    started_ns = 0

    def __init__(self, command: Sequence[str], log: IO[bytes]) -> None:
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
        )
        assert self._process.stdout is not None and self._process.stdin is not None
        self.replies, self._orders = self._process.stdout, self._process.stdin

    def start(self, job: Job, now_ns: int) -> None:
        """Send a job. If the process has exited, `receive` reports it."""
        self.job, self.started_ns = job, now_ns
        try:
            self._orders.write(json.dumps(job.plain()).encode() + b"\n")
            self._orders.flush()
        except BrokenPipeError:
            return

    def receive(self) -> bool:
        """Read a reply. Return False if the process has exited."""
        return bool(self.replies.readline())

    def exit_text(self) -> str:
        """Return how the process ended."""
        try:
            code = self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            return "the process closed its output"
        return f"the process of the run exited with code {code}; see workers.log"

    def stop(self, *, kill: bool) -> None:
        """End the process and close its pipes."""
        if kill:
            self._process.kill()
        with suppress(BrokenPipeError):
            self._orders.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.replies.close()
