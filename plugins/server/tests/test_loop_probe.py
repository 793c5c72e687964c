"""No request blocks the event loop, not even the largest requests and requests at each limit.

The fixture `check_event_loops` of this directory checks this after every other test, too.
"""

import asyncio
import json
import time
from collections import Counter

import pytest

from dovetail_server.lifecycle import loop_probe
from dovetail_server.lifecycle.loop_probe import MAX_BLOCKED_S, LoopProbe
from dovetail_server.transport.pacing import MAX_STARTS, StartPacer

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


def use_cpu(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def warnings_of(caplog, work):
    async def run():
        with LoopProbe().watch():
            work()
        await asyncio.sleep(0.03)

    asyncio.run(run())
    return [record.message for record in caplog.records if record.name == loop_probe.__name__]


def test_a_callback_that_computes_for_too_long_is_reported(caplog):
    (message,) = warnings_of(caplog, lambda: use_cpu(2 * MAX_BLOCKED_S))
    assert "blocked the event loop" in message


def test_a_callback_that_waits_without_using_the_cpu_is_not_reported(caplog):
    assert warnings_of(caplog, lambda: time.sleep(2 * MAX_BLOCKED_S)) == []


def test_requests_that_arrive_together_start_in_several_iterations_of_the_event_loop():
    starts, turns = [], Counter()

    async def run():
        pacer, turn = StartPacer(), 0

        async def start(number):
            await pacer.wait()
            starts.append(number)
            turns[turn] += 1

        tasks = [asyncio.create_task(start(number)) for number in range(5 * MAX_STARTS)]
        while len(starts) < len(tasks):
            turn += 1
            await asyncio.sleep(0)

    asyncio.run(run())
    assert starts == list(range(5 * MAX_STARTS))
    assert len(turns) >= 5 and max(turns.values()) <= MAX_STARTS


def large(path):
    """Request bodies just below the limits of size and of the number of values."""
    text, numbers, texts = "a " * (1 << 20), [1] * 250_000, ["ab"] * 200_000
    nested = {"a": [{"b": [n]} for n in range(19_000)]}
    fields = [
        *({name: text} for name in ("user", "cache_salt", "stop", "model", "chat_template")),
        *({name: numbers} for name in ("stop_token_ids", "allowed_token_ids", "tokens")),
        *({name: texts} for name in ("bad_words", "stop", "unknown")),
        {"logit_bias": {str(n): 1.5 for n in range(50_000)}},
        {"chat_template_kwargs": nested},
        {"response_format": nested},
        {f"f{n}": 1 for n in range(50_000)},
    ]
    if path == "/v1/completions":
        fields += [
            {"prompt": item}
            for item in (text, numbers, texts, [[1]] * 50_000, [text[:500_000]] * 4)
        ]
    elif path == "/detokenize":
        fields += [{"tokens": item} for item in (numbers, texts, text)]
    else:
        messages = [{"role": "user", "content": "a"}]
        parts = [{"type": "text", "text": "a"}] * 18_000
        fields += [
            {"messages": [{"role": "user", "content": text}]},
            {"messages": messages * 18_000},
            {"messages": [{"role": "user", "content": parts}]},
            {"messages": messages, "chat_template_kwargs": {"a": text}},
            {"messages": [*messages, {"role": "assistant", "content": "b", "extra": nested}]},
            {"prompt": text[:200_000], "return_token_strs": True},
        ]
    return fields


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", PATHS)
def test_the_largest_requests_do_not_block_the_event_loop(server, path):
    start = {"prompt": "Anna"} if path in PATHS[::2] else {"messages": [{"role": "user"}]}
    for fields in large(path):
        body = json.dumps((start if "messages" not in fields else {}) | fields)
        assert server.send("POST", path, body, {"Content-Type": "application/json"}).status < 500
        server.check_loop(str(fields)[:40])
