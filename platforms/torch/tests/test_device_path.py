"""The runner gives the same results on an asynchronous device as on the host, step by step."""

from array import array

import pytest
import torch

from dovetail.interfaces.ops import DrawColumns
from dovetail.plan import NewRequest, StepBuilder
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.harnesses.late_device import LateDevice, late_parts
from dovetail_devkit.harnesses.runner_harness import Backend, Model, Steps, V
from dovetail_devkit.harnesses.runner_programs import NUM_BLOCKS, Program, play
from dovetail_torch.runner.staging import Staging

PROMPT = [3, 1, 4, 1, 5, 9]


@pytest.mark.costly
@pytest.mark.parametrize("depth", [1, 2, 7])
@pytest.mark.parametrize("seed", range(4))
def test_random_plans_give_the_same_results_as_on_the_host(runner_of, seed, depth):
    program = Program(seed, 40)
    assert sum(count for _, _, count in program.steps) > 30
    expected = play(runner_of(Model(), Backend, num_blocks=NUM_BLOCKS), program)
    parts = late_parts()
    actual = play(runner_of(Model(), Backend, parts, NUM_BLOCKS), program, depth)
    assert actual == expected
    assert any(item.logprobs for item in actual) and any(item.prompt_logprobs for item in actual)


def test_the_host_does_not_wait_before_a_result_is_requested(runner_of):
    parts = late_parts()
    runner = runner_of(Model(), Backend, parts)
    steps = Steps(runner)
    steps.builder.join(new_request(0, PROMPT))
    steps.builder.grow(0, [7, 2, 5])
    steps.builder.run(0, 0, 6, samples=True)
    runner.execute_model(steps.builder.build())
    first = runner.sample_tokens()
    steps.builder.run(0, 6, 1, samples=True)
    runner.execute_model(steps.builder.build())
    second = runner.sample_tokens()
    assert parts.asynchronous.num_waits == 0 and not first.done()
    expected = Model().answer(PROMPT, 2)
    assert [*second.result().token_ids, *first.result().token_ids] == expected[::-1]
    assert first.done() and first.result() is first.result()


def new_request(row, tokens, **params):
    return NewRequest(
        request_id=f"r{row}",
        row=row,
        generation=1,
        token_ids=array("i", tokens),
        num_prompt_tokens=len(tokens),
        sampling_params=SamplingParams(**({"temperature": 0, "max_tokens": 20} | params)),
        stop_token_ids=frozenset(),
        bad_words_token_ids=(),
        seed=5,
    )


def test_a_device_error_is_reported_to_the_caller(runner_of):
    parts = late_parts()
    runner = runner_of(Model(), Backend, parts)
    builder = StepBuilder()
    builder.join(new_request(0, PROMPT))
    builder.grow(0, [7, 2])
    builder.run(0, 0, 6, samples=True)
    runner.execute_model(builder.build())
    late = runner.sample_tokens()
    parts.asynchronous.fails = RuntimeError("an illegal instruction")
    with pytest.raises(TimeoutError):
        late.result(timeout=0.001)
    runner.shutdown()  # raises nothing
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal"):
            late.result()


def test_warm_up_steps_change_no_state(runner_of):
    runner = runner_of(Model(), Backend, late_parts())
    runner.warm_up()
    expected = Model().answer(PROMPT, 3)
    builder, actual = StepBuilder(), []
    builder.join(new_request(0, PROMPT))
    builder.grow(0, [7, 2, 5])
    for start, count in ((0, 6), (6, 1), (7, 1)):
        builder.run(0, start, count, samples=True)
        runner.execute_model(builder.build())
        actual += runner.sample_tokens().result().token_ids
    assert actual == expected


def test_the_op_provider_samples_the_tokens_of_all_requests_in_one_call(runner_of):
    calls = []

    def draw_tokens(logits_RV, columns: DrawColumns):
        calls.append(columns)
        return logits_RV.argmin(-1)

    runner = runner_of(Model(), Backend, late_parts(draw_tokens=draw_tokens))
    builder = StepBuilder()
    all_settings = (
        {},
        {"temperature": 0.5, "top_k": 4},
        {"temperature": 1.0, "top_p": 0.5, "min_p": 0.1},
    )
    for row, settings in enumerate(all_settings):
        builder.join(new_request(row, PROMPT[: row + 1], **settings))
        builder.grow(row, [row + 1])
        builder.run(row, 0, row + 1, samples=True)
    runner.execute_model(builder.build())
    tokens = runner.sample_tokens().result().token_ids
    logits = torch.stack([Model().logits(PROMPT[: n + 1]) for n in range(3)])
    assert list(tokens) == logits.argmin(-1).tolist()
    (columns,) = calls
    assert columns.temperature_R.tolist() == [0.0, 0.5, 1.0]
    assert columns.top_k_R.tolist() == [V, 4, V] and columns.top_k_R.dtype == torch.int32
    assert columns.top_p_R.tolist() == [1.0, 1.0, 0.5]
    assert columns.min_p_R.tolist() == pytest.approx([0, 0, 0.1])
    assert columns.seeds_R.tolist() == [5, 5, 5] and columns.seeds_R.dtype == torch.int64
    assert columns.positions_R.tolist() == [1, 2, 3]


def test_the_measured_memory_of_a_step_includes_sampling(runner_of):
    calls = []

    def draw_tokens(logits_RV, columns: DrawColumns):
        calls.append(columns)
        return logits_RV.argmax(-1)

    runner = runner_of(Model(), Backend, late_parts(draw_tokens=draw_tokens))
    runner.loaded.dummy_run(8, 3)
    (columns,) = calls
    assert len(columns.top_p_R) == 3 and bool((columns.top_p_R < 1).all())


def test_greedy_steps_send_one_packet_to_the_device(runner_of, monkeypatch):
    packets, send = [], Staging.send
    monkeypatch.setattr(
        Staging, "send", lambda self, arrays: packets.append(1) or send(self, arrays)
    )
    runner = runner_of(Model(), Backend, late_parts())
    builder = StepBuilder()
    builder.join(new_request(0, PROMPT))
    builder.grow(0, [7, 2])
    for start, count in ((0, 6), (6, 1)):
        builder.run(0, start, count, samples=True)
        runner.execute_model(builder.build())
        runner.sample_tokens().result()
    assert len(packets) == 2


def test_the_fake_asynchronous_device_detects_reused_slots_and_early_reads():
    """Reused slots and early reads on the fake device raise errors."""
    device = LateDevice()
    source, target = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    event = device.fetch([source], [target])
    source[0] = 9
    with pytest.raises(AssertionError, match="written to"):
        event.synchronize()
