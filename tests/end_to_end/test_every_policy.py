"""The demo model gives the same outputs under every installed scheduling policy.

With two batch slots, small steps and a small cache, requests finish in a different order under each
policy, and some policies preempt.
"""

from __future__ import annotations

import pytest

from dovetail import LLM, SamplingParams
from dovetail.interfaces import StatLogger
from dovetail.plugins import PluginRegistry

POLICIES = sorted({candidates.name for candidates in PluginRegistry().candidates("policy")})
ASKED = [
    ("What is 27 + 58?", 12),
    ("Spell planet.", 24),
    ("What is 4 + 9?", 8),
    ("Sort these numbers: 8, 3, 5.", 20),
    ("Count from 3 to 9.", 28),
    ("Reverse the word stone.", 16),
]
OPTIONS = {
    "num_threads": 1,
    "dtype": "float32",  # in bfloat16, near ties would depend on the batch shape
    "max_num_seqs": 3,
    "max_num_batched_tokens": 24,
    "block_size": 4,
    "kv_cache_memory_bytes": 100 * 4 * 1024,
    "max_model_len": 64,
    "use_tqdm_on_load": False,
}


class Preemptions(StatLogger):
    """A stat logger that records the number of preemptions."""

    num = 0

    def __init__(self, context):
        type(self).num = 0

    def record(self, step):
        type(self).num = step.scheduler.num_preemptions

    def close(self):
        pass


def generate(scheduler_cls):
    """Return the output tokens, the order of completion, and the number of preemptions."""
    conversations = [[{"role": "user", "content": question}] for question, _ in ASKED * 2]
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=length,
            ignore_eos=True,
            extra_args={"expected_tokens": length},
        )
        for _, length in ASKED * 2
    ]
    options = OPTIONS | {"stat_loggers": [Preemptions]}
    with LLM("demo", scheduler_cls=scheduler_cls, **options) as llm:
        outputs = llm.chat(conversations, params, use_tqdm=False)
    ends = [output.metrics.finished_ns for output in outputs]
    order = sorted(range(len(ends)), key=lambda index: ends[index])
    return [output.outputs[0].token_ids for output in outputs], order, Preemptions.num


@pytest.fixture(scope="module")
def expected():
    return generate("fcfs")


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "fcfs"])
def test_the_outputs_do_not_depend_on_the_policy(policy, expected):
    assert generate(policy)[0] == expected[0]


@pytest.mark.costly
def test_the_order_in_which_requests_finish_depends_on_the_policy(expected):
    assert {"srpt", "static", "vtc"} <= set(POLICIES)
    assert expected[2] > 0, "no request is preempted: the cache is too large"
    assert generate("sjf")[1] != expected[1]
    assert generate("static")[2] == 0


def test_the_policy_receives_tenants_and_deadlines():
    llm = LLM("demo", scheduler_cls="vtc", **{**OPTIONS, "max_num_seqs": 1})
    engine, params = llm.llm_engine, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for number in range(3):
        engine.add_request(f"many-{number}", {"prompt": "ab", "tenant": "many"}, params)
    engine.add_request("few", {"prompt": "ab", "tenant": "few", "deadline_s": 9.0}, params)
    order = [
        output.request_id
        for _ in range(40)
        if engine.has_unfinished_requests()
        for output in engine.step()
        if output.finished
    ]
    assert order == [
        "many-0",
        "few",
        "many-1",
        "many-2",
    ]  # "few" arrived last
