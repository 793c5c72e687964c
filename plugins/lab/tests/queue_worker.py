"""A worker process for tests, in which a single-server queue replaces the engine.

The policies are "fcfs", "shortest" (by output length) and "tuned" (with the `slowness` option), and
some that fail: "raises", "hangs", "exits", "prints", "unfinished" and "incomplete".
"""

import heapq
import json
import os
import sys
import time
from array import array

from dovetail_lab.experiments.job import Job, do_job
from dovetail_lab.simulation.results import NEVER, RequestColumns, RunResult, StepColumns

NS = 1_000_000_000
PREFILL_NS = 100_000
DECODE_NS = 1_000_000


def run_queue(spec, key, workload, *, trust_local_code):
    """Serve one request at a time: 0.1 ms per prompt token, 1 ms per output token."""
    name = spec.policy(key.policy).policy
    if name == "raises":
        raise RuntimeError("the policy is broken")
    if name == "hangs":
        time.sleep(600)
    if name == "exits":
        os._exit(7)
    if name == "prints":
        print("hello from a policy")
    slowness = spec.policy(key.policy).options.get("slowness", 1.0)
    requests = workload.requests
    columns = RequestColumns()
    for item in vars(columns).values():
        item.extend([0] * len(requests))
    steps, now, waiting = StepColumns(), 0, []
    arrivals = sorted(range(len(requests)), key=lambda i: requests[i].arrival_ns)
    position = 0
    while position < len(arrivals) or waiting:
        if not waiting:
            now = max(now, requests[arrivals[position]].arrival_ns)
        while position < len(arrivals) and requests[arrivals[position]].arrival_ns <= now:
            index = arrivals[position]
            rank = requests[index].num_output_tokens if name == "shortest" else index
            heapq.heappush(waiting, (rank, index))
            position += 1
        _, index = heapq.heappop(waiting)
        request = requests[index]
        prefill = request.num_prompt_tokens * PREFILL_NS
        decode = round((request.num_output_tokens - 1) * DECODE_NS * slowness)
        columns.arrival_ns[index] = request.arrival_ns
        columns.admitted_ns[index] = now
        columns.first_token_ns[index] = now + prefill
        columns.last_token_ns[index] = columns.finished_ns[index] = now + prefill + decode
        columns.num_output_tokens[index] = request.num_output_tokens
        columns.max_gap_ns[index] = DECODE_NS
        row = (now, prefill + decode, 1, request.num_prompt_tokens, 1, 1, len(waiting), 5)
        for column, value in zip(vars(steps).values(), row, strict=True):
            column.append(value)
        now += prefill + decode
    if name == "unfinished":
        columns.finished_ns[-3:] = array("q", [NEVER] * 3)
    return RunResult(
        requests=columns,
        steps=steps,
        num_steps=len(requests),
        num_request_steps=len(requests),
        end_ns=now,
        host_ns=1,
        scheduler_ns=1000,
        num_blocks=100,
        max_num_batched_tokens=2048,
        error="stopped at step 5" if name == "incomplete" else "",
    )


def main():
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        record = do_job(Job.from_plain(json.loads(line)), run_queue)
        sys.stdout.flush()
        replies.write(json.dumps({"run_id": record.run_id}) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
