"""Run a supervised engine from startup to shutdown and print JSON. Arguments: MODEL EXECUTOR.

The program prints one line and exits, whatever fault DOVETAIL_FAULTS requests. Keys of the line:
outcome is "served" or the class of the error; message is the text of the error or of the failed
requests; tokens are those of the last served request, which is the same in every run.
"""

import gc
import json
import os
import sys
import threading

from engine_process_parts import ControlledWorker
from engine_traffic import Answers, request

from dovetail.config import EngineArgs
from dovetail.engine.process import engine_process
from dovetail.engine.process.factory import make_client
from dovetail.engine.supervision.rules import SupervisionRules
from dovetail.errors import UnavailableError
from dovetail.interfaces import EngineCoreOutputs
from dovetail.request import FinishReason
from dovetail.scheduling import Scheduler
from dovetail_devkit.fakes.platform import FakePlatform

EMPTY = EngineCoreOutputs()
RULES = SupervisionRules(
    max_restarts=2,
    first_delay_s=0.02,
    max_silence_s=0.7,
    kill_silence_s=1.2,
    max_step_s=1.5,
    kill_step_s=2.0,
)
WAIT_S = 4.0


def make_config(model, executor):
    return EngineArgs(
        model=model,
        platform=FakePlatform,
        worker_cls=ControlledWorker,
        scheduler_cls=Scheduler,
        skip_tokenizer_init=True,
        executor_backend=executor,
        start_timeout_s=3,
        plugin_options={executor: {"stop_timeout_s": 1}} if executor == "multiproc" else {},
    ).create_engine_config()


def run_engine(model, executor, result):
    """Serve requests, call the worker, abort and shut down. Write the results to `result`."""
    engine_process.START_GRACE_S = 1.5
    client = make_client(make_config(model, executor), "sync", rules=RULES)
    try:
        serve(client, result)
    finally:
        client.shutdown()


def serve(client, result):
    for number in range(6):
        try:
            results = serve_one(client, number)
        except UnavailableError as error:
            result["message"] += f" {error}"
            client.wait_until_ready(WAIT_S)
            continue
        result["message"] += "".join(f" {message}" for _, message in results.ends.values())
        if results.ends.get(f"r{number}", ("", ""))[0] is FinishReason.LENGTH:
            result["tokens"] = results.tokens[f"r{number}"]


def serve_one(client, number):
    """Run the standard request, and abort another request. Return the standard request's tokens."""
    client.add_request(request(f"r{number}", range(20), 12))
    client.add_request(request(f"aborted{number}", max_tokens=300))
    client.call_workers("echo", (number,))
    client.abort_requests([f"aborted{number}"])
    outputs = Answers()
    for _ in range(40):
        if f"r{number}" in outputs.ends:
            break
        outputs.take(client.get_outputs(WAIT_S / 20) or EMPTY)
    return outputs


def main():
    result = {"outcome": "served", "message": "", "tokens": []}
    before = left_open()
    try:
        run_engine(sys.argv[1], sys.argv[2], result)
    except Exception as error:
        result["outcome"] = type(error).__name__
        result["message"] += f" {error}"
    gc.collect()
    result["left"] = sorted(set(left_open()) - set(before))
    print(json.dumps(result), flush=True)


def left_open():
    """Return the targets of open descriptors, and the names of threads."""
    files = []
    for name in os.listdir("/proc/self/fd"):
        if os.path.exists(f"/proc/self/fd/{name}"):
            files.append(os.readlink(f"/proc/self/fd/{name}"))
    return [file for file in files if "/proc/" not in file] + [
        t.name for t in threading.enumerate()
    ]


if __name__ == "__main__":
    main()
