"""Start an engine, print two process ids and the directory, and wait. Arguments: MODEL BUSY.

BUSY: the number of running requests.
"""

import os
import sys
import time

from engine_process_parts import ControlledWorker
from engine_traffic import request

from dovetail.config import EngineArgs
from dovetail.engine.process.factory import make_client
from dovetail.scheduling import Scheduler
from dovetail_devkit.fakes.platform import FakePlatform

if __name__ == "__main__":
    args = EngineArgs(
        model=sys.argv[1],
        platform=FakePlatform,
        worker_cls=ControlledWorker,
        scheduler_cls=Scheduler,
        skip_tokenizer_init=True,
    )
    client = make_client(args.create_engine_config(), "sync")
    found = client.process_id, client.call_workers("child_pid")[0], os.path.dirname(client.address)
    for number in range(int(sys.argv[2])):
        client.add_request(request(f"r{number}", max_tokens=400))
    print(*found, flush=True)
    time.sleep(600)
