"""A worker process waits for its device without using much CPU time."""

import threading
import time
from array import array

from dovetail.executors.multiproc.host import WorkerHost
from dovetail.result import ModelRunnerOutput
from dovetail.transport.order_frame import encode_sample
from dovetail.transport.ring import RingShape, make_ring

COMPUTING_S = 0.5


class Computing:
    """The result of a step, available after `COMPUTING_S` seconds."""

    def __init__(self):
        self.end_s = time.monotonic() + COMPUTING_S

    def done(self):
        return time.monotonic() >= self.end_s

    def result(self, timeout=None):
        return ModelRunnerOutput(step_id=1, num_sampled=array("B"), token_ids=array("i"))


class Worker:
    def sample_tokens(self, grammar):
        return Computing()


def test_a_worker_uses_little_cpu_time_while_its_device_computes():
    writer, (commands_end,) = make_ring(RingShape(num_readers=1, slot_bytes=256))
    responses, (results_end,) = make_ring(RingShape(num_readers=1, slot_bytes=256))
    used = []

    def serve():
        start_s = time.thread_time()
        with commands_end.take() as commands:
            WorkerHost(Worker(), 0, commands, responses).serve()
        used.append(time.thread_time() - start_s)

    thread = threading.Thread(target=serve)
    with responses, results_end.take() as results:
        thread.start()
        with writer:
            writer.send(encode_sample(None))
            results.receive(timeout_s=20)
        thread.join()
    assert used[0] < COMPUTING_S / 2
