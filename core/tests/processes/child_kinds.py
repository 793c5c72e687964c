"""The three kinds of child processes: how to start, use and stop each.

As a program, `child_kinds.py KIND MODEL` starts a kind, prints the ids of its processes, and waits.
"""

import gc
import json
import sys
import time

from dovetail import LLM, SamplingParams
from dovetail.processes.child_process import ChildProcess
from dovetail.sandbox.child import BoundedChild, ChildLimits, ChildTask
from dovetail_devkit.contexts import SMALL_ENGINE


class Engine:
    """An engine in a child process."""

    option = ("engine_process", True)
    boot_fault = "engine.boot"

    def __init__(self, model_dir):
        self.llm = LLM(
            model_dir,
            platform="dovetail_devkit.fakes.platform:FakePlatform",
            worker_cls="dovetail_devkit.fakes.worker:FakeWorker",
            scheduler_cls="dovetail.scheduling:Scheduler",
            skip_tokenizer_init=True,
            **SMALL_ENGINE,
            **dict([self.option]),
        )

    def use(self):
        prompt = {"prompt_token_ids": [1, 2]}
        return self.llm.generate(prompt, SamplingParams(max_tokens=2), use_tqdm=False)

    def close(self):
        self.llm.shutdown()


class Worker(Engine):
    """A worker in a child process of an engine in this process."""

    option = ("executor_backend", "multiproc")
    boot_fault = "worker.boot"


class Sandbox:
    """A sandboxed child process."""

    def __init__(self, model_dir, handler="child_handlers:answer"):
        task = ChildTask(handler=handler, packages=("child_handlers",))
        self.child = BoundedChild(task, ChildLimits(timeout_s=10.0, memory_bytes=256 << 20))

    def use(self):
        return self.child.call(b'"hi"')

    def close(self):
        self.child.close()


KINDS = {"engine": Engine, "worker": Worker, "sandbox": Sandbox}


def running_children():
    """Return the running children of this process."""
    gc.collect()
    actual = [item for item in gc.get_objects() if type(item) is ChildProcess]
    return [item for item in actual if not item.is_closed]


if __name__ == "__main__":
    kind = KINDS[sys.argv[1]](sys.argv[2])
    kind.use()
    print(json.dumps([child.pid for child in running_children()]), flush=True)
    time.sleep(600)
