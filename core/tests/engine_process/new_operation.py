"""Call a new engine operation through every kind of client. Argument: MODEL.

The program imports a copy of the core with the new operation. It prints one line of JSON: the
result of each client.
"""

import asyncio
import json
import sys

from engine_process_parts import ControlledWorker
from engine_traffic import request

from dovetail.config import EngineArgs
from dovetail.engine.process.factory import attach_client, make_client
from dovetail.engine.supervision.rules import SupervisionRules
from dovetail.errors import UserError
from dovetail.interfaces import PauseScope
from dovetail.scheduling import Scheduler
from dovetail_devkit.fakes.platform import FakePlatform

CLIENTS = {
    "in process": {"kind": "inproc"},
    "process": {"kind": "sync"},
    "process, async": {"kind": "async"},
    "supervised": {"kind": "sync", "rules": SupervisionRules()},
    "supervised, async": {"kind": "async", "rules": SupervisionRules()},
}


def main():
    config = EngineArgs(
        model=sys.argv[1],
        platform=FakePlatform,
        worker_cls=ControlledWorker,
        scheduler_cls=Scheduler,
        skip_tokenizer_init=True,
    ).create_engine_config()
    results = {}
    for name, options in CLIENTS.items():
        client = make_client(config, **options)
        try:
            use = use_async(client) if options["kind"] == "async" else None
            results[name] = asyncio.run(use) if use else use_sync(client)
            if name == "process":
                other = attach_client(client.address, "sync")
                results["attached"] = use_sync(other)
                other.shutdown()
        finally:
            client.shutdown()
    print(json.dumps(results))


def use_sync(client):
    client.add_request(request("a", max_tokens=400))
    actual = [client.count_requests(), client.count_requests(["a", "b"], scale=2.5)]
    client.pause(PauseScope.ALL)
    try:
        client.count_requests()
    except UserError as error:
        actual.append(str(error))
    client.resume()
    client.abort_requests(["a"])
    return actual


async def use_async(client):
    await client.add_request(request("a", max_tokens=400))
    actual = [await client.count_requests(), await client.count_requests(["a", "b"], scale=2.5)]
    await client.pause(PauseScope.ALL)
    try:
        await client.count_requests()
    except UserError as error:
        actual.append(str(error))
    await client.resume()
    await client.abort_requests(["a"])
    return actual


if __name__ == "__main__":
    main()
