"""Fixtures: asynchronous engines with plugins that a child process can import."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from dovetail import LLM, AsyncLLM
from dovetail.config import EngineArgs
from dovetail.scheduling import Scheduler
from dovetail_devkit.fakes.platform import FakePlatform
from dovetail_devkit.fakes.tokenizer import ByteTokenizer

HERE = Path(__file__).parent
CONFIG = {
    "architectures": ["ControlledStepWorker"],
    "vocab_size": 259,
    "max_position_embeddings": 512,
}


class Bench:
    """An event loop and the engines that run in it."""

    def __init__(self, folder, parts):
        self.folder, self.parts = folder, parts
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(
            lambda loop, context: self.complaints.append(context["message"])
        )
        self.complaints = []
        self.made = []

    def options(self, *, worker_config=None, **changes):
        """Return engine options. `worker_config` is added to the model's config.json."""
        (self.folder / "config.json").write_text(json.dumps(CONFIG | (worker_config or {})))
        return {
            "model": self.folder,
            "platform": FakePlatform,
            "worker_cls": self.parts.ControlledStepWorker,
            "scheduler_cls": Scheduler,
            "tokenizer_mode": ByteTokenizer,
            "max_num_seqs": 8,
        } | changes

    def start(self, *, max_waiting=100_000, rules=None, **options):
        """Start an engine: `start(worker_config={"step_s": 0.1}, async_scheduling=True)`."""
        args = EngineArgs(**self.options(**options))
        self.made.append(AsyncLLM.from_engine_args(args, max_waiting=max_waiting, rules=rules))
        return self.made[-1]

    def direct(self, **options):
        """Return an `LLM` with the options that `start` accepts."""
        return LLM(**self.options(**options))

    def run(self, coroutine, timeout_s=20):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, timeout_s))

    def close(self):
        for llm in self.made:
            llm.shutdown()
            llm.shutdown()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        assert not asyncio.all_tasks(self.loop), "tasks are still running"
        self.loop.close()
        assert not self.complaints, "the event loop reported an error; see the failed tests"


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """An event loop and its engines for a test module. `bench.run` runs a coroutine in the loop."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        import async_llm_parts

        created = Bench(tmp_path_factory.mktemp("model"), async_llm_parts)
        yield created
        created.close()
        sys.modules.pop("async_llm_parts", None)


@pytest.fixture(scope="module")
def llm(bench):
    """One fast engine shared by the tests of a module."""
    return bench.start()
