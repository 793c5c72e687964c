"""The CPU time of the front end per token, compared with a reference in the same run."""

from array import array
from time import thread_time_ns

import pytest

from dovetail.clock import ManualClock
from dovetail.engine.output.output_processor import OutputProcessor
from dovetail.interfaces.scheduler import EngineCoreOutputs
from dovetail.outputs import CompletionOutput, RequestMetrics, RequestOutput, RequestOutputKind
from dovetail.request import EngineCoreRequest
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.fakes.tokenizer import ByteTokenizer

NUM_REQUESTS = 256
NUM_STEPS = 24
NUM_TRIES = 3
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def token_cost_ns(tokenizer=None, prompt_len=8, kind=DELTA, **params):
    """Return the minimum CPU time per token over several decode steps."""
    processor = OutputProcessor(tokenizer or ByteTokenizer(), clock=ManualClock(1))
    names = [f"r{n}" for n in range(NUM_REQUESTS)]
    prompt = array("i", [97]) * prompt_len
    for name in names:
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=1000, **params),
            max_tokens=1000,
        )
        processor.add_request(name, [request], kind=kind)
    step = EngineCoreOutputs(
        request_ids=names,
        num_new_tokens=array("i", [1]) * NUM_REQUESTS,
        token_ids=array("i", [ord("x")]) * NUM_REQUESTS,
    )
    times = []
    for _ in range(NUM_STEPS):
        start_ns = thread_time_ns()
        processor.process(step)
        times.append(thread_time_ns() - start_ns)
    return min(times[2:]) / NUM_REQUESTS


def outputs_cost_ns():
    """Return the minimum CPU time per token to create only the two output objects."""
    metrics, prompt, times = RequestMetrics(1), [1], []
    for _ in range(NUM_STEPS):
        start_ns = thread_time_ns()
        for _ in range(NUM_REQUESTS):
            done = CompletionOutput(0, "a", [1], None, None, None, None)
            RequestOutput("r", None, prompt, [done], False, metrics, None, 0, None)
        times.append(thread_time_ns() - start_ns)
    return min(times) / NUM_REQUESTS


def min_ratio(measure, reference):
    """Return the smallest of several ratios. A busy machine only increases a ratio."""
    return min(measure() / reference() for _ in range(NUM_TRIES))


@pytest.mark.clock
def test_the_cost_of_a_streamed_token_does_not_depend_on_the_prompt_length():
    ratio = min_ratio(lambda: token_cost_ns(prompt_len=4096), token_cost_ns)
    assert ratio < 1.5, f"{ratio:.2f}"


@pytest.mark.clock
@pytest.mark.parametrize(
    ("options", "maximum"),
    [
        ({"kind": FINAL_ONLY}, 0.8),  # the measured ratio is 0.4
        ({"kind": DELTA}, 7.0),  # the measured ratio is 3.6
        ({"kind": DELTA, "stop": ["\n\nHuman:"]}, 12.0),  # the measured ratio is 6
    ],
    ids=["final only", "delta", "stop string"],
)
def test_the_front_end_time_per_token_is_a_small_multiple_of_the_time_to_create_its_outputs(
    options, maximum
):
    ratio = min_ratio(lambda: token_cost_ns(**options), outputs_cost_ns)
    print(f"{options}: {ratio:.2f} times its output")
    assert ratio < maximum


def test_tokens_are_not_decoded_if_the_tokenizer_provides_pieces():
    class Counting(ByteTokenizer):
        num_calls = 0

        def decode(self, token_ids, *, skip_special_tokens=False):
            Counting.num_calls += 1
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    token_cost_ns(Counting())
    token_cost_ns(Counting(), stop=["never"])
    assert Counting.num_calls == 0
