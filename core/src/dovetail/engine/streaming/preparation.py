"""Prepares requests without blocking the event loop: long requests are prepared in threads.

Long strings, many bad words and long lists are read in pieces of a few milliseconds, between which
other threads can run. Very long requests share one thread, so that they do not delay shorter ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sized
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from dovetail.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dovetail.engine.front_end import CheckedRequest, FrontEnd
    from dovetail.request import EngineCoreRequest

LONG_WORK = 2048
"""Number of characters, about 1 ms of work, above which a request is prepared in a thread."""

VERY_LONG_WORK = 2**18
"""Number of characters, about 0.1 s of work, above which the thread for long requests is used."""

ID_WORK = 4
"""Number of ids in a list that take as long as one character of text."""

NUM_THREADS = 2


class Preparers:
    """Threads that prepare requests for one front end. The owner closes them."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front
        self._long = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prepare")
        self._very_long = ThreadPoolExecutor(1, thread_name_prefix="prepare-long")

    async def prepare(self, checked: CheckedRequest) -> EngineCoreRequest:
        """Return the prepared request. Raise RequestError if one of its parameters is invalid."""
        work = work_of(checked)
        if work <= LONG_WORK:
            return self._front.prepare(checked)
        pool = self._long if work <= VERY_LONG_WORK else self._very_long
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(pool, self._front.prepare, checked)

    def close(self) -> None:
        """Drop queued requests. Do not wait for the running ones."""
        for pool in (self._long, self._very_long):
            pool.shutdown(wait=False, cancel_futures=True)


def work_of(checked: CheckedRequest) -> int:
    """Return the amount of work needed to prepare a request, in characters of text to tokenize."""
    content, params = checked.read.content, checked.user_request.params
    work = len(checked.read.text or "")
    if not isinstance(content, str):
        known = type(content) in (list, tuple, range) and isinstance(content, Sized)
        work = len(content) // ID_WORK if known else LONG_WORK + 1  # type: ignore[arg-type]
    if not isinstance(params, SamplingParams):
        return work
    work += sum(map(len, params.bad_words or ())) + 16 * len(params.bad_words or ())
    lists = (params.stop_token_ids, params.allowed_token_ids, params.logit_bias)
    work += sum(len(ids or ()) for ids in lists) // ID_WORK
    return work
