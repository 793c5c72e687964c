"""`AsyncLLM`: streams of outputs, rejected requests, and calls such as `collective_rpc`."""

import asyncio
from random import Random

import pytest

from dovetail import AsyncLLM, SamplingParams
from dovetail.errors import CapacityError, ConfigError, RequestError, UserError
from dovetail.interfaces import Policy
from dovetail.outputs import RequestOutputKind

SEED = 20261121
DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


async def collect(stream):
    return [output async for output in stream]


async def last(stream):
    return (await collect(stream))[-1]


def random_prompts(num=30):
    """Yield random prompts and parameters, each with a different seed."""
    rng = Random(SEED)
    for index in range(num):
        text = "".join(rng.choices("abcdefgh é—", k=rng.randint(1, 60)))
        yield (
            text if index % 3 else [rng.randrange(256) for _ in range(rng.randint(1, 60))],
            SamplingParams(
                max_tokens=rng.randint(1, 60),
                n=rng.choice((1, 1, 3)),
                seed=rng.randrange(1000),
                stop=[rng.choice("aeiou") + rng.choice("xyz"), "q"] if index % 4 == 0 else None,
                logprobs=3 if index % 5 == 0 else None,
                prompt_logprobs=2 if index % 7 == 0 else None,
            ),
        )


def facts_of(output):
    return (output.prompt, output.prompt_token_ids, output.outputs, output.prompt_logprobs)


def joined(outputs):
    """Join delta outputs. Return text, tokens and finish reason by completion index."""
    created = {}
    for output in outputs:
        for item in output.outputs:
            text, tokens, logprobs, _ = created.get(item.index, ("", [], [], None))
            logprobs = logprobs + (item.logprobs or [])
            created[item.index] = (
                text + item.text,
                tokens + item.token_ids,
                logprobs,
                item.finish_reason,
            )
    return created


@pytest.mark.costly
@pytest.mark.parametrize("ahead", [False, True], ids=["depth1", "depth2"])
def test_async_outputs_equal_those_of_an_in_process_engine(bench, ahead):
    pending = list(random_prompts())
    with bench.direct(async_scheduling=ahead) as direct:
        prompts, params = zip(*pending, strict=True)
        expected = direct.generate(list(prompts), list(params), use_tqdm=False)
    starting = bench.start(async_scheduling=ahead)

    async def ask_all(kind):
        streams = [
            starting.generate(*ask, f"{kind}{n}", output_kind=kind) for n, ask in enumerate(pending)
        ]
        return await asyncio.gather(*map(collect, streams))

    for kind in (RequestOutputKind.CUMULATIVE, FINAL):
        actual = bench.run(ask_all(kind))
        assert [facts_of(outputs[-1]) for outputs in actual] == [facts_of(out) for out in expected]
        assert all(outputs[-1].finished for outputs in actual)
        assert not any(output.finished for outputs in actual for output in outputs[:-1])
        assert kind is not FINAL or {len(outputs) for outputs in actual} == {1}
    for outputs, one_expected in zip(bench.run(ask_all(DELTA)), expected, strict=True):
        assert joined(outputs) == {
            done.index: (done.text, done.token_ids, done.logprobs or [], done.finish_reason)
            for done in one_expected.outputs
        }
        assert outputs[0].prompt_logprobs == one_expected.prompt_logprobs
        assert all(output.prompt_logprobs is None for output in outputs[1:])
    assert any(len(out.outputs) == 3 for out in expected)
    assert len({done.finish_reason for out in expected for done in out.outputs}) > 1
    assert starting.num_unfinished == 0
    starting.shutdown()


def test_the_time_stamps_of_a_request_are_in_order(bench, llm):
    metrics = bench.run(last(llm.generate("say", SamplingParams(max_tokens=3)))).metrics
    assert 0 < metrics.arrival_ns < metrics.first_token_ns <= metrics.finished_ns
    assert llm.last_stats.num_blocks > 0


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [999]}, "prompt"),
        ({"prompt": "x" * 600}, "prompt"),
        ({"prompt": "x" * 6000}, "prompt"),
        ({"prompt": "\ud800" * 6000}, "prompt"),
        ({"prompt": {"prompt": "a", "deadline": 3}}, "prompt"),
        ({"params": "hot"}, "params"),
        ({"params": SamplingParams(logprobs=21)}, "logprobs"),
        ({"request_id": 7}, "request_id"),
        ({"priority": 2**64}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"cache_salt": 7}, "cache_salt"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"timeout_s": "1"}, "timeout_s"),
    ],
)
def test_the_error_for_a_rejected_request_names_the_parameter_and_does_not_affect_other_requests(
    bench, llm, arguments, parameter
):
    async def ask():
        other = asyncio.create_task(last(llm.generate("say", SamplingParams(max_tokens=60))))
        await asyncio.sleep(0)
        with pytest.raises(RequestError) as rejection:
            await collect(llm.generate(**({"prompt": "say", "request_id": "bad"} | arguments)))
        assert rejection.value.parameter == parameter
        assert (await last(llm.generate("say", SamplingParams(max_tokens=2), "bad"))).finished
        return await other

    assert bench.run(ask()).finished and llm.num_unfinished == 0


@pytest.mark.costly
def test_a_request_that_the_engine_rejects_ends_with_the_reason(bench):
    starting = bench.start(scheduler_cls=bench.parts.RejectingScheduler)

    async def ask():
        pending = [starting.generate("say", SamplingParams(max_tokens=n, seed=1)) for n in (12, 13)]
        return await asyncio.gather(*map(last, pending))

    valid, bad = bench.run(ask())
    assert bad.finished and "not thirteen" in bad.error
    assert bad.outputs[0].finish_reason == "error"
    assert valid.error is None and starting.num_unfinished == 0
    starting.shutdown()


def test_a_request_id_is_in_use_until_its_last_output_is_sent(bench, llm):
    async def ask():
        first = llm.generate("say", SamplingParams(max_tokens=30), "a", output_kind=FINAL)
        task = asyncio.create_task(last(first))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="'a' is in use") as rejection:
            await collect(llm.generate("say", None, "a"))
        assert rejection.value.parameter == "request_id"
        assert (await task).finished
        return await last(llm.generate("say", SamplingParams(max_tokens=2), "a"))

    assert bench.run(ask()).finished


@pytest.mark.costly
def test_the_number_of_waiting_requests_is_limited(bench):
    with pytest.raises(ConfigError, match="max_waiting=-1"):
        bench.start(max_waiting=-1)
    starting = bench.start(max_waiting=2, max_num_seqs=2, worker_config={"step_s": 0.002})
    params = SamplingParams(max_tokens=20)

    async def ask():
        tasks = [asyncio.create_task(last(starting.generate("say", params))) for _ in range(3)]
        await asyncio.sleep(0.02)
        with pytest.raises(CapacityError, match=r"has 3 completions .* accept 2 more: at most 4"):
            await collect(starting.generate("say", SamplingParams(n=2)))
        assert (
            await last(starting.generate("say", params))
        ).finished  # the limit allows one more waiting request
        assert all(output.finished for output in await asyncio.gather(*tasks))
        return await last(starting.generate("say", SamplingParams(n=4, max_tokens=2)))

    assert len(bench.run(ask()).outputs) == 4
    starting.shutdown()


@pytest.mark.costly
def test_a_request_of_higher_priority_is_served_first(bench):
    starting = bench.start(max_num_seqs=1, scheduler_cls=bench.parts.ByPriority)
    done = []

    async def ask(name, priority):
        await last(starting.generate("say", SamplingParams(max_tokens=4), name, priority=priority))
        done.append(name)

    async def ask_all():
        await starting.pause()
        pending = asyncio.gather(*(ask(f"p{n}", n) for n in (2, 0, 3, 1)))
        await asyncio.sleep(0.05)
        assert not done and starting.num_unfinished == 4
        await starting.resume()
        await pending

    assert issubclass(bench.parts.ByPriority, Policy)
    bench.run(ask_all())
    assert done == ["p0", "p1", "p2", "p3"]
    starting.shutdown()


def test_requests_with_the_same_salt_share_prefixes_until_the_cache_is_reset(bench, llm):
    prompt = "the same words again and again, so that they fill some blocks of the cache"

    async def num_cached(salt):
        params = SamplingParams(max_tokens=2)
        return (await last(llm.generate(prompt, params, cache_salt=salt))).num_cached_tokens

    async def ask():
        actual = [await num_cached(salt) for salt in ("x", "x", "y")]
        assert await llm.reset_prefix_cache()
        return [*actual, await num_cached("x")]

    first, again, other, after = bench.run(ask())
    assert first == other == after == 0 and again > 30


def test_collective_rpc_returns_the_results_of_the_workers(bench, llm):
    assert bench.run(llm.collective_rpc("echo", 1, deep=[None])) == [[[1], {"deep": [None]}]]
    with pytest.raises(UserError, match="scope='most' is not a valid pause scope"):
        bench.run(llm.pause("most"))
    assert llm.max_model_len == 512 and llm.supported_tasks == ("generate",)
    assert (
        llm.config.model.architecture == "ControlledStepWorker"
        and llm.tokenizer.decode([65]) == "A"
    )
    assert llm.default_sampling_params() == SamplingParams()


def test_using_another_event_loop_is_rejected(bench, llm):
    bench.run(llm.resume())
    with pytest.raises(UserError, match="another event loop"):
        asyncio.run(llm.resume())
    with pytest.raises(UserError, match="another event loop"):
        asyncio.run(collect(llm.generate("say")))


@pytest.mark.costly
def test_listeners_are_notified_of_steps_and_rejections(bench):
    starting = bench.start(
        stat_loggers=(bench.parts.Counting,), hooks=(bench.parts.RecordingHooks,), max_num_seqs=2
    )
    bench.run(last(starting.generate("say", SamplingParams(max_tokens=7, ignore_eos=True))))
    with pytest.raises(RequestError):
        bench.run(collect(starting.generate([], None, "bad")))
    starting.shutdown()
    assert bench.parts.Counting.num_tokens == 7
    assert bench.parts.RecordingHooks.recorded == ["bad", "stop"]


@pytest.mark.costly
def test_the_error_for_a_model_that_does_not_support_text_generation_lists_its_tasks(bench):
    starting = bench.start(worker_config={"tasks": ["embed"]})
    with pytest.raises(
        UserError, match="ControlledStepWorker does not support text generation; it supports: embed"
    ):
        starting.generate("say")
    starting.shutdown()


@pytest.mark.costly
def test_async_llm_accepts_the_options_of_llm(bench, monkeypatch):
    options = bench.options(max_num_seqs=3)
    for llm in (AsyncLLM(**options), AsyncLLM(options.pop("model"), **options, max_waiting=5)):
        bench.made.append(llm)
        assert llm.config.scheduler.max_num_seqs == 3
        assert bench.run(last(llm.generate("a", SamplingParams(max_tokens=1)))).finished
    bench.made.append(AsyncLLM(llm.config))
    with pytest.raises(ConfigError, match="Did you mean 'max_num_seqs'"):
        AsyncLLM("demo", max_num_seq=3)
    with pytest.raises(ConfigError, match="max_num_seqs=3 cannot be combined with an EngineConfig"):
        AsyncLLM(llm.config, max_num_seqs=3)
    with pytest.raises(ConfigError, match="max_waiting"):
        AsyncLLM(llm.config, max_waiting=-1)
