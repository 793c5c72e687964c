"""Engines with fake plugins and a common interface: in-process, in an engine process, async."""

from __future__ import annotations

import asyncio
import json

from dovetail import LLM, AsyncLLM
from dovetail.config import EngineArgs
from dovetail.engine.llm_engine import LLMEngine
from dovetail.outputs import RequestOutputKind
from dovetail.scheduling import Scheduler
from dovetail_devkit.fakes.platform import FakePlatform
from dovetail_devkit.fakes.tokenizer import ByteTokenizer
from dovetail_devkit.fakes.worker import FakeWorker

MAX_MODEL_LEN = 256
CONFIG = {"architectures": ["Fake"], "vocab_size": 300, "max_position_embeddings": MAX_MODEL_LEN}
FINAL = RequestOutputKind.FINAL_ONLY


def engine_options(folder, **changes):
    """Return the options of a small engine with fake plugins. Its model directory is `folder`."""
    config = CONFIG | changes.pop("config", {})
    (folder / "config.json").write_text(json.dumps(config))
    return {
        "model": str(folder),
        "platform": FakePlatform,
        "worker_cls": FakeWorker,
        "scheduler_cls": Scheduler,
        "tokenizer_mode": ByteTokenizer,
        "max_num_seqs": 16,
    } | changes


class EngineFrontEnd:
    """Sends requests to an `LLMEngine`."""

    def __init__(self, options):
        self.engine = LLMEngine.from_engine_args(EngineArgs(**options))

    def ask_all(self, requests):
        """Return each request's last output, or the exception with which it was rejected."""
        collected = []
        for _, request in enumerate(requests):
            kwargs = {"output_kind": FINAL} | request
            try:
                self.engine.add_request(**kwargs)
                collected.append(kwargs["request_id"])
            except Exception as error:
                collected.append(error)
        ended = {}
        while self.engine.has_unfinished_requests():
            ended |= {item.request_id: item for item in self.engine.step() if item.finished}
        return [item if isinstance(item, Exception) else ended[item] for item in collected]

    def close(self):
        self.engine.shutdown()


class AsyncFrontEnd:
    """Sends requests to an `AsyncLLM`, all at the same time."""

    def __init__(self, options):
        self.llm = AsyncLLM(**options)
        self.loop = asyncio.new_event_loop()

    def ask_all(self, requests):
        """Return each request's last output, or the exception with which it was rejected."""
        return self.loop.run_until_complete(asyncio.wait_for(self._ask_all(requests), 60))

    async def _ask_all(self, requests):
        tasks = [self._last({"output_kind": FINAL} | request) for request in requests]
        actual = await asyncio.gather(*tasks, return_exceptions=True)
        await self.llm.check_health()
        return actual

    async def _last(self, arguments):
        return [output async for output in self.llm.generate(**arguments)][-1]

    def close(self):
        self.llm.shutdown()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


def open_front_end(kind, options):
    """Return a new engine of the kind "in process", "engine process" or "async"."""
    if kind == "async":
        return AsyncFrontEnd(options)
    return EngineFrontEnd(options | {"engine_process": kind == "engine process"})


def open_llm(kind, options):
    """Return an `LLM` with the engine core in this process or in a separate process."""
    return LLM(**options, engine_process=kind == "engine process")
