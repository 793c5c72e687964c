"""Requests for an engine, their results, and checks for leaked resources of an engine."""

import asyncio
import gc
import os
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from random import Random

import zmq

from dovetail.engine.process.boot import OUTPUT_SOCKET
from dovetail.request import EngineCoreRequest
from dovetail.sampling_params import SamplingParams
from dovetail.transport.messages import Hello, pack
from dovetail_devkit.harnesses import process_tree

SEED = 20261121


def request(name, prompt=(1, 2, 3), max_tokens=5, **params):
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
        max_tokens=max_tokens,
    )


def random_requests():
    rng = Random(SEED)
    return [
        request(f"r{n}", [rng.randrange(97) for _ in range(rng.randint(1, 40))], rng.randint(1, 30))
        for n in range(20)
    ]


class Answers:
    """The results of requests, collected from a client's outputs."""

    def __init__(self):
        self.tokens, self.ends = {}, {}

    def take(self, outputs):
        end = 0
        for name, count in zip(outputs.request_ids, outputs.num_new_tokens, strict=True):
            self.tokens.setdefault(name, []).extend(outputs.token_ids[end : end + count])
            end += count
        for item in outputs.finished:
            assert item.request_id not in self.ends, "a request ended twice"
            self.ends[item.request_id] = (item.reason, item.message)

    def collect(self, client, num_ends):
        num_waits = 0
        while len(self.ends) < num_ends:
            outputs = client.get_outputs(5)
            if outputs is not None:
                self.take(outputs)
            num_waits = 0 if outputs is not None else num_waits + 1
            assert num_waits < 3, "the engine does nothing"
        return self.tokens, self.ends

    def collect_until(self, client, name):
        """Collect outputs until the given request ends."""
        while name not in self.ends:
            outputs = client.get_outputs(5)
            assert outputs is not None, "the engine does nothing"
            self.take(outputs)
        return self.tokens, self.ends

    async def collect_async(self, client, num_ends):
        while len(self.ends) < num_ends:
            self.take(await asyncio.wait_for(client.get_outputs(), 10))
        return self.tokens, self.ends


@contextmanager
def raw_front_end(address):
    """Attach a front end. Return its socket for sending bytes and its socket for receiving."""
    with zmq.Context() as context:
        context.linger = 5000
        name = os.urandom(16)
        ends = []
        for path in (address, str(Path(address).parent / OUTPUT_SOCKET)):
            end = context.socket(zmq.DEALER)
            end.setsockopt(zmq.ROUTING_ID, name)
            end.setsockopt(zmq.SNDHWM, 0)
            end.connect(f"ipc://{path}")
            ends.append(end)
        while not ends[1].poll(50):
            ends[0].send(pack(Hello()))
        yield ends
        for end in ends:
            end.close()


def is_running(pid):
    """Return whether a process still exists after two seconds."""
    for _ in range(100):
        if not process_tree.is_running(pid):
            return False
        time.sleep(0.02)
    return True


def open_resources():
    """Return the current descriptors, shared memory, semaphores and directories of engines."""
    gc.collect()
    shared = [name for name in os.listdir("/dev/shm") if name.startswith(OURS)]
    folders = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("dovetail-")]
    return len(os.listdir("/proc/self/fd")), sorted(shared), sorted(folders)


OURS = ("dovetail", "psm_", "sem.")
