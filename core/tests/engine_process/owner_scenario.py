"""Drop an engine, leave it open at exit, or fork its process. Print the observations.

Arguments: MODEL KIND WHAT. KIND is the kind of engine and WHAT the action; both are defined below.
The program prints one line of JSON: the observations and the resources that the engine leaked.
"""

import asyncio
import atexit
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time

from engine_process_parts import ControlledWorker
from engine_traffic import open_resources, request

from dovetail import LLM, AsyncLLM, SamplingParams
from dovetail.config import EngineArgs
from dovetail.engine.process.factory import make_client
from dovetail.engine.supervision.rules import SupervisionRules
from dovetail.errors import EngineDeadError
from dovetail.scheduling import Scheduler
from dovetail_devkit.fakes.platform import FakePlatform
from dovetail_devkit.fakes.tokenizer import ByteTokenizer
from dovetail_devkit.harnesses.process_tree import children_of

PARTS = {"platform": FakePlatform, "worker_cls": ControlledWorker, "scheduler_cls": Scheduler}
PARTS |= {"max_num_seqs": 4}
LONG = {"prompt_token_ids": [1, 2, 3]}


used_at_exit = []


# Registered before any engine exists, so that it runs after all finalizers.
@atexit.register
def use_at_exit():
    for having in used_at_exit:
        print(json.dumps(failure_of(having.serve)), flush=True)


def failure_of(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "served"


def config(model, **options):
    args = EngineArgs(model=model, **PARTS, skip_tokenizer_init=True, **options)
    return args.create_engine_config()


class EngineOwner:
    """The owner of an engine. `busy` adds a long request. `serve` runs a request to completion."""

    def __init__(self, model):
        self.engine = self.make(model)


class OverProcess(EngineOwner):
    def options(self):
        return {"engine_process": True}

    def make(self, model):
        return LLM(model, **PARTS, tokenizer_mode=ByteTokenizer, **self.options())

    def busy(self):
        self.engine.llm_engine.add_request(
            "busy", LONG, SamplingParams(max_tokens=50, ignore_eos=True)
        )
        self.engine.llm_engine.step()

    def serve(self):
        (output,) = self.engine.generate([LONG], SamplingParams(max_tokens=2, ignore_eos=True))
        return len(output.outputs[0].token_ids)


class InProcess(OverProcess):
    def options(self):
        return {"engine_process": False}


class WithWorkers(OverProcess):
    def options(self):
        return {"engine_process": False, "executor_backend": "multiproc"}


class Client(EngineOwner):
    def make(self, model):
        return make_client(config(model), "sync")

    def busy(self):
        for number in range(3):
            self.engine.add_request(request(f"busy{number}", max_tokens=400))
        self.engine.get_outputs(5)

    def serve(self):
        self.engine.add_request(request("one", max_tokens=1))
        while not self.engine.get_outputs(5).finished:
            pass
        return 1


class Supervised(Client):
    def make(self, model):
        return make_client(config(model), "sync", rules=SupervisionRules())


class SupervisedWorkers(Client):
    def make(self, model):
        return make_client(
            config(model, executor_backend="multiproc"), "sync", rules=SupervisionRules()
        )


class AsyncClient(EngineOwner):
    def make(self, model):
        return make_client(config(model), "async")

    def busy(self):
        async def begin(client):
            for number in range(3):
                await client.add_request(request(f"busy{number}", max_tokens=400))
            await client.get_outputs()

        asyncio.run(begin(self.engine))

    def serve(self):
        async def begin(client):
            await client.add_request(request("one", max_tokens=1))
            return len((await client.get_outputs()).finished)

        return asyncio.run(begin(self.engine))


class AsyncSupervised(AsyncClient):
    def make(self, model):
        return make_client(config(model), "async", rules=SupervisionRules())


class AsyncFrontEnd(EngineOwner):
    def make(self, model):
        args = EngineArgs(model=model, **PARTS, tokenizer_mode=ByteTokenizer)
        return AsyncLLM.from_engine_args(args, rules=SupervisionRules())

    def busy(self):
        asyncio.run(self.first(400))

    def serve(self):
        return asyncio.run(self.first(1))

    async def first(self, max_tokens):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        async for _ in self.engine.generate(LONG, params):
            return 1


# --- engines that are dropped ------------------------------------------------------------------


def drop(having):
    """Drop the references to engines in several ways. Return the longest shutdown in seconds."""
    kind, model = type(having), sys.argv[1]
    having.engine = None
    slowest = 0.0
    for way, is_used in ((plainly, False), (in_a_cycle, True), (in_a_thread, True)):
        having = kind(model)
        if is_used:
            having.busy()
        start = time.monotonic()
        way(having)
        having = None
        gc.collect()
        slowest = max(slowest, time.monotonic() - start)
    return slowest


def plainly(having):
    having.engine = None


class ReferenceCycle:
    """An object in a reference cycle. Its finalizer uses the engine."""

    def __del__(self):
        self.seen = repr(self.engine)


def in_a_cycle(having):
    knot = ReferenceCycle()
    knot.itself, knot.engine = knot, having.engine
    having.engine.knot = knot
    having.engine = None


def in_a_thread(having):
    def run():
        having.engine = None
        gc.collect()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


# --- engines open at exit ----------------------------------------------------------------------


def leave(having):
    having.busy()
    globals()["kept"] = having


def leave_in_a_cycle(having):
    having.busy()
    gc.disable()
    in_a_cycle(having)


def leave_by_an_error(having):
    having.busy()
    globals()["kept"] = having
    raise SystemExit("an error")


def leave_and_use(having):
    having.busy()
    used_at_exit.append(having)


class User:
    """An object that uses the engine in a finalizer, after the engine's finalizers have run."""

    def __init__(self, having):
        self.having, self.itself = having, self

    def __del__(self):
        finals.append(failure_of(self.having.serve))


finals = []


def use_in_a_finalizer(having):
    first = type(having)(sys.argv[1])
    first.serve()
    User(first)
    del first
    gc.collect()
    return finals


# --- forked processes --------------------------------------------------------------------------


def fork(having):
    """Fork in several ways. Return the children's exit codes after the engine has served a
    request."""
    children = (by_exit, by_os_exit, by_error, by_collection, by_use, by_shutdown)
    statuses = {child.__name__: in_a_fork(child, having) for child in children}
    method = multiprocessing.get_context("fork")
    process = method.Process(target=by_use, args=(having,))
    process.start()
    process.join(20)
    statuses["multiprocessing"] = process.exitcode
    served = having.serve()
    having.engine.shutdown()
    return {"statuses": statuses, "served": served}


def in_a_fork(child, having):
    pid = os.fork()
    if not pid:
        # The child exits normally: exit hooks and finalizers run.
        child(having)
        sys.exit(0)
    for _ in range(1000):
        actual, status = os.waitpid(pid, os.WNOHANG)
        if actual:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return "hangs"


def by_exit(having):
    sys.exit(0)


def by_os_exit(having):
    os._exit(0)


def by_error(having):
    raise RuntimeError("in the child, deliberately")


def by_collection(having):
    having.engine = None
    gc.collect()


def by_use(having):
    """Use the engine in a forked child. Exit with status 7 if no error is raised."""
    for call in (having.serve, having.busy, having.serve):
        try:
            call()
        except EngineDeadError as error:
            if "forked child" not in str(error):
                sys.exit(str(error))
        else:
            sys.exit(7)


def by_shutdown(having):
    having.engine.shutdown()


def outlive(having):
    """Leave a forked child running, print the process ids and wait to be killed."""
    having.busy()
    child = os.fork()
    if not child:
        os.closerange(0, 3)
        time.sleep(60)
        os._exit(0)
    print(json.dumps({"child": child, "children": descendants_of(os.getpid())}), flush=True)
    os.kill(os.getpid(), 9)


def descendants_of(pid):
    actual = sorted(children_of(pid))
    return actual + [below for item in actual for below in descendants_of(item)]


def without_directory(having):
    """Delete the working directory and kill the engine. The restarted engine must serve."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
    os.kill(having.engine.process_id, 9)
    while not having.engine.num_restarts:
        having.engine.get_outputs(0.1)
    try:
        return having.serve()
    finally:
        having.engine.shutdown()


def main():
    model, kind, what = sys.argv[1:]
    gc.collect()
    before = open_resources()
    having = globals()[kind](model)
    observed = globals()[what](having)
    having = None
    if what.startswith("leave"):
        return
    gc.collect()
    for _ in range(100):
        if threading.active_count() == 1:
            break
        time.sleep(0.02)
    remaining = {
        "children": descendants_of(os.getpid()),
        "threads": [item.name for item in threading.enumerate()][1:],
        "open_resources": [was == now for was, now in zip(before, open_resources(), strict=True)],
    }
    print(json.dumps({"observed": observed, "left": remaining}))


if __name__ == "__main__":
    main()
