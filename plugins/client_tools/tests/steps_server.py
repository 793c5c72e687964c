"""The route /steps of a server without an engine, with the steps of a given number of requests."""

import json
import time

STEP_NS = 40_000_000
NUM_PROMPT = 64


class StepsServer:
    """Responds with the steps since the server's start, or with `status` and `body` if set."""

    def __init__(self, null, num_requests=256):
        self._null = null
        self._numbers = list(range(1, num_requests + 1))
        self.started_ns = time.monotonic_ns()
        self.status, self.body = "200 OK", None
        self.stats = {}

    def respond(self, path, body):
        content = self.body
        if content is None:
            query = dict(pair.split("=") for pair in path.partition("?")[2].split("&"))
            content = json.dumps(self.trace(int(query["after"]), int(query["max_steps"]))).encode()
        return self._null.whole(content, "application/json", self.status)

    def trace(self, after, max_steps):
        now_ns = time.monotonic_ns()
        num_steps = (now_ns - self.started_ns) // STEP_NS + 1
        first = max(after, num_steps - 1024) if after <= num_steps else 0
        numbers = range(first + 1, min(num_steps, first + max_steps) + 1)
        running = len(self._numbers)
        return {
            "started_ns": self.started_ns,
            "now_ns": now_ns,
            "after": first,
            "num_steps": num_steps,
            "num_new_tokens": num_steps * running,
            "num_computed_tokens": (num_steps + NUM_PROMPT - 1) * running,
            "stats": {
                "num_running": running,
                "num_waiting": 3,
                "num_blocks": 1000,
                "num_used_blocks": 345,
                "prefix_queries": 200,
                "prefix_hits": 50,
                "num_preemptions": 2,
                "policy": "FCFSPolicy",
                **self.stats,
            },
            "steps": [self._step(number, number == first + 1) for number in numbers],
        }

    def _step(self, number, is_first):
        is_prefill = number == 1
        num_tokens = NUM_PROMPT if is_prefill else 1
        step = {
            "number": number,
            "step_id": number,
            "begin_ns": self.started_ns + number * STEP_NS,
            "planned_ns": self.started_ns + number * STEP_NS,
            "end_ns": self.started_ns + (number + 1) * STEP_NS - 5_000_000,
            "num_tokens": num_tokens * len(self._numbers),
            "num_new_tokens": len(self._numbers),
            "num_running": len(self._numbers),
            "num_used_blocks": 345,
            "decodes": self._numbers if is_first or number == 2 else None,
        }
        if is_prefill:
            step["joined"] = [[number, NUM_PROMPT, NUM_PROMPT] for number in self._numbers]
            step["prefills"] = [[number, 0, NUM_PROMPT] for number in self._numbers]
            step["decodes"] = []
        return step
