"""Start workers, print their process ids and that of a child, and wait. Argument: MODEL."""

import sys
import time
from pathlib import Path

from multiproc_parts import FaultyWorker

from dovetail.executors.multiproc.executor import MultiprocExecutor
from dovetail_devkit.contexts import make_executor_context

if __name__ == "__main__":
    context = make_executor_context(Path(sys.argv[1]), FaultyWorker, tensor_parallel_size=2)
    executor = MultiprocExecutor(context)
    pids = [*executor.collective_rpc("pid"), *executor.collective_rpc("has_child")]
    meet = executor.collective_rpc("location", unique_reply_rank=0)["rendezvous"]
    print(*pids, Path(meet.removeprefix("file://")).parent, flush=True)
    time.sleep(600)
