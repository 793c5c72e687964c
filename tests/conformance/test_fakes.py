"""Engines on fakes and on the null executor, and the imports of the conformance kit."""

import subprocess
import sys
from array import array

import pytest

from bigram_dovetail import RoundRobinScheduler
from dovetail import LLM, SamplingParams
from dovetail.clock import ManualClock
from dovetail.engine.core import EngineCore
from dovetail.interfaces import Executor, SchedulerContext, SchedulerLimits
from dovetail.plan import StepBuilder
from dovetail.scheduling import Scheduler
from dovetail_devkit import FAKES
from dovetail_devkit.contexts import SMALL_ENGINE, write_fake_config
from dovetail_devkit.executor.null_executor import TOKEN, NullExecutor
from dovetail_devkit.rows.state import predict_token
from dovetail_devkit.scheduler.program import make_kv_cache
from dovetail_devkit.suites.scheduler import check_scheduler, make_request

PROMPTS = [[1, 2, 3], [4] * 20, [5, 6]]
NUM_TOKENS = 6


def generated_alone(prompt, seed):
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        tokens.append(predict_token(tokens, seed, 97))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("parts", [FAKES, {}], ids=["only fakes", "fakes among real plugins"])
@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_runs_on_fakes(parts, ahead, tmp_path):
    names = {
        "scheduler_cls": parts.get("scheduler", "fcfs"),
        "executor_backend": parts.get("executor", "uniproc"),
    }
    llm = LLM(
        write_fake_config(tmp_path),
        platform=FAKES["platform"],
        worker_cls=FAKES["worker"],
        skip_tokenizer_init=True,
        async_scheduling=ahead,
        **SMALL_ENGINE,
        **names,
    )
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, seed=seed, detokenize=False, ignore_eos=True)
        for seed in range(len(PROMPTS))
    ]
    outputs = llm.generate(PROMPTS, params)
    actual = [list(output.outputs[0].token_ids) for output in outputs]
    assert actual == [generated_alone(prompt, seed) for seed, prompt in enumerate(PROMPTS)]


def test_the_null_executor_returns_a_token_for_every_request_that_samples():
    executor = NullExecutor()
    assert isinstance(executor, Executor)
    builder = StepBuilder()
    for samples in ([1, 0, 1], [0], [], [1, 1, 1, 1]):
        for row, sampled in enumerate(samples):
            builder.run(row, 0, 2, samples=bool(sampled))
        plan = builder.build()
        assert executor.execute_model(plan).result() is None
        result = executor.sample_tokens().result()
        assert list(result.num_sampled) == samples
        assert result.token_ids == array("i", [TOKEN] * sum(samples))
        assert result.step_id == plan.step_id


def test_an_engine_core_runs_on_the_null_executor():
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=32)
    kv_cache = make_kv_cache(num_blocks=65, block_size=4)
    scheduler = Scheduler(SchedulerContext(limits=limits, kv_cache=kv_cache, clock=ManualClock()))
    core = EngineCore(NullExecutor(), scheduler, vocab_size=100, max_model_len=32)
    for index in range(8):
        core.add_request(make_request(f"r{index}", max_tokens=5))
    values = []
    while core.has_work():
        outputs = core.step_with_batch_queue()
        values.extend(outputs.token_ids if outputs else ())
    assert values == [TOKEN] * 8 * 5


@pytest.mark.costly
def test_a_scheduler_of_a_third_party_package_meets_the_contract():
    check_scheduler(RoundRobinScheduler, keeps_cache=False)


@pytest.mark.costly
def test_the_conformance_kit_imports_tensor_libraries_only_for_plugins_with_tensors():
    program = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "from dovetail_devkit import load_fake, load_suite\n"
        "assert not [n for n in sys.modules if n.startswith('dovetail_devkit.')]\n"
        "kinds = ('attention', 'executor', 'linear_method', 'ops', 'platform', 'policy',\n"
        "         'scheduler', 'tokenizer', 'worker')\n"
        "for kind in kinds:\n"
        "    load_suite(kind), load_fake(kind)\n"
        "load_suite('scheduler')(load_fake('scheduler'), num_programs=3)\n"
        "load_suite('policy')(load_fake('policy'), num_programs=3)\n"
        "load_suite('executor')(load_fake('executor'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
