"""Log-probabilities in outputs: columns that look like lists of dictionaries."""

import copy
import gc
import time
from array import array

import pytest

from dovetail.clock import ManualClock
from dovetail.engine.output.output_chunks import cut_outputs
from dovetail.engine.output.output_processor import OutputProcessor
from dovetail.interfaces.scheduler import EngineCoreOutputs
from dovetail.logprobs import LogprobStore
from dovetail.outputs import Logprob, LogprobSequence, RequestOutputKind
from dovetail.request import EngineCoreRequest
from dovetail.result import LogprobColumns
from dovetail.sampling_params import SamplingParams

TEXTS = {97: "a", 98: "b"}
PLAIN = [
    None,
    {97: Logprob(-1.0, 1, "a")},
    {98: Logprob(-2.0, 2, "b"), 97: Logprob(-0.5, 1, "a")},
]


def make_store():
    store = LogprobStore(TEXTS)
    store.add_unknown()
    for counts, token_ids, logprobs, rank in (
        ([2], [97, 97], [-1.0, -1.0], 1),  # the sampled token is also the most likely one
        ([2], [98, 97], [-2.0, -0.5], 2),
    ):
        store.extend(
            LogprobColumns(
                counts=array("i", counts),
                token_ids=array("i", token_ids),
                logprobs=array("f", logprobs),
                ranks=array("i", [rank]),
            )
        )
    return store


def test_logprobs_are_read_like_a_list_of_dictionaries():
    shown = LogprobSequence(make_store())
    assert list(shown) == PLAIN and len(shown) == 3
    assert type(shown[1]) is dict and list(shown[2]) == [98, 97]
    assert (shown[-1], shown[:2], shown[::-1]) == (PLAIN[-1], PLAIN[:2], PLAIN[::-1])
    assert list(reversed(shown)) == PLAIN[::-1] and PLAIN[2] in shown
    assert repr(shown) == repr(PLAIN)
    for invalid in (3, -4):
        with pytest.raises(IndexError):
            shown[invalid]


def test_logprobs_compare_and_concatenate_like_a_list():
    shown, again = LogprobSequence(make_store()), LogprobSequence(make_store())
    for plain in (PLAIN, again):
        assert shown == plain
        assert plain == shown
    assert shown != PLAIN[:2] and shown != [None, *PLAIN[:2]] and shown != "abc"
    assert shown + PLAIN == PLAIN + shown == shown + shown == PLAIN + PLAIN
    for copied in (copy.copy(shown), copy.deepcopy(shown)):
        assert type(copied) is list and copied == PLAIN


def test_returned_logprobs_do_not_change_when_later_logprobs_arrive():
    store = make_store()
    shown = LogprobSequence(store)
    store.add_unknown()
    assert shown == PLAIN and LogprobSequence(store) == [*PLAIN, None]


@pytest.fixture
def no_collector():
    """Disable the garbage collector, because all objects of pytest add to its CPU time."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.clock
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_millions_of_logprobs_are_stored_as_columns_until_they_are_read(kind, no_collector):
    """The request has 9,000 prompt tokens, 1,024 completions and 1,024 logprobs per token."""
    num = 1_025
    prompt = _columns(9_000, num)
    first = _columns(1, num)
    names = [f"r#{index}" for index in range(1_024)]
    params = SamplingParams(n=1, max_tokens=2, logprobs=1_024, prompt_logprobs=1_024)
    processor = OutputProcessor(None, clock=ManualClock(1))
    requests = [
        EngineCoreRequest(
            request_id=name,
            prompt_token_ids=array("i", [1]) * 9_001,
            sampling_params=params,
            max_tokens=2,
        )
        for name in names
    ]
    group = processor.add_request("r", requests, kind=kind)
    outputs = EngineCoreOutputs(
        request_ids=names,
        num_new_tokens=array("i", [1]) * len(names),
        token_ids=array("i", [0]) * len(names),
        logprobs=dict.fromkeys(names, first),
        prompt_logprobs={names[0]: prompt},
    )
    num_objects, longest_ns = len(gc.get_objects()), 0
    for piece in cut_outputs(outputs, 128):
        start_ns = time.thread_time_ns()
        processor.process_chunk(piece)
        longest_ns = max(longest_ns, time.thread_time_ns() - start_ns)
    start_ns = time.thread_time_ns()
    output = group.output()
    longest_ns = max(longest_ns, time.thread_time_ns() - start_ns)
    print(f"{kind.name}: {longest_ns / 1e6:.1f} ms at most")
    assert longest_ns < 50e6
    assert len(gc.get_objects()) - num_objects < 20_000, "columns are not objects"
    assert len(output.prompt_logprobs) == 9_001 and output.prompt_logprobs[0] is None
    assert list(output.prompt_logprobs[9_000]) == list(range(num))
    if kind is RequestOutputKind.FINAL_ONLY:
        assert [len(done.logprobs) for done in output.outputs] == [1] * 1_024
        assert output.outputs[-1].logprobs[0][7] == Logprob(-2.0, 7)


def _columns(num_positions, num_entries):
    return LogprobColumns(
        counts=array("i", [num_entries]) * num_positions,
        token_ids=array("i", range(num_entries)) * num_positions,
        logprobs=array("f", [-2.0]) * (num_entries * num_positions),
        ranks=array("i", [1]) * num_positions,
    )
