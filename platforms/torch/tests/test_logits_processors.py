"""Logits processors in the sampler and the worker: order, rows and cost."""

from array import array
from itertools import count

import pytest
import torch

from dovetail.plan import NewRequest
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.fakes.logits_processor import FakeLogitsProcessor
from dovetail_torch.sampling import Sampler
from dovetail_torch.sampling import sampler as sampler_module
from dovetail_torch.sampling.processors import ProcessorExtension
from dovetail_torch.step_extensions import StepExtensions
from dovetail_torch.worker import TorchWorker

VOCAB = 12
HOST = torch.device("cpu")
ASKING = {"fake_count_up": True}


class Watched(FakeLogitsProcessor):
    """A processor that records its logits and the order of the calls of all processors."""

    clock = count()

    def __init__(self, vocab_size=VOCAB):
        self._vocab_size, self._last = vocab_size, {}
        self.calls, self.seen = [], []

    def join(self, request):
        self.calls.append(("join", request.row))
        return super().join(request)

    def leave(self, row):
        self.calls.append(("leave", row))
        super().leave(row)

    def apply(self, logits_SV, rows):
        self.calls.append(("apply", tuple(rows)))
        self.order = next(Watched.clock)
        self.seen.append(logits_SV.clone())
        return super().apply(logits_SV, rows)

    def accept(self, rows, token_ids_R):
        self.calls.append(("accept", tuple(rows), tuple(token_ids_R.tolist())))
        super().accept(rows, token_ids_R)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def new_request(row=0, tokens=(1, 2, 3), *, num_prompt=None, stop=(), **params):
    settings = {"temperature": 0, "extra_args": ASKING} | params
    return NewRequest(
        request_id=f"r{row}",
        row=row,
        generation=1,
        token_ids=array("i", tokens),
        num_prompt_tokens=len(tokens) if num_prompt is None else num_prompt,
        sampling_params=SamplingParams(**settings),
        stop_token_ids=frozenset(stop),
        bad_words_token_ids=(),
        seed=row,
    )


class ExtendedSampler(Sampler):
    """A sampler with extensions, called as a model runner calls it."""

    def __init__(self, processors):
        created = {str(i): ProcessorExtension(processor) for i, processor in enumerate(processors)}
        self.extensions = StepExtensions(created, torch.from_numpy)
        super().__init__(num_rows=8, vocab_size=VOCAB, device=HOST, extensions=self.extensions)

    def join(self, request):
        self.extensions.join(request)
        super().join(request)

    def end(self, row):
        self.extensions.leave(row)
        self.leave(row)

    def sample(self, logits_SV, rows):
        sampled = super().sample(logits_SV, rows)
        self.extensions.after_sampling(rows, sampled.token_ids)
        return sampled


def new_sampler(*requests, processors):
    sampler = ExtendedSampler(processors)
    for request in requests:
        sampler.join(request)
    return sampler


def descending_logits(num_rows=1):
    """Return logits that order the tokens by id: token 0 is the most likely, then token 1."""
    return torch.arange(VOCAB, 0, -1, dtype=torch.float32).repeat(num_rows, 1)


def sample(sampler, *rows, dtype=torch.float32):
    return sampler.sample(descending_logits(len(rows)).to(dtype), list(rows)).token_ids.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_logits_processor_gets_the_tokens_of_its_request(dtype):
    processor = Watched()
    sampler = new_sampler(
        new_request(0),
        new_request(1, [9, 8]),
        new_request(2, extra_args={}),
        processors=[processor],
    )
    assert [sample(sampler, 0, 2, 1, dtype=dtype) for _ in range(3)] == [
        [4, 0, 9],
        [5, 0, 10],
        [6, 0, 11],
    ]
    assert ("accept", (0, 1), (4, 9)) in processor.calls
    assert all(logits.dtype == torch.float32 for logits in processor.seen)


def test_a_logits_processor_is_not_called_in_a_step_without_its_requests(monkeypatch):
    processor = Watched()
    requests = [new_request(0), new_request(1, extra_args={}), new_request(2, extra_args={})]
    requests[2] = new_request(2, extra_args={}, temperature=1.0, seed=None)
    sampler = new_sampler(*requests, processors=[processor])
    monkeypatch.setattr(processor, "apply", lambda *_: pytest.fail("nobody asked"))
    sample(sampler, 1, 2)
    monkeypatch.setattr(sampler_module.Sampler, "_describe", lambda *_: pytest.fail("slow path"))
    assert sample(sampler, 1) == [0]


def test_a_logits_processor_is_not_applied_to_the_next_request_in_the_same_row():
    processor = Watched()
    sampler = new_sampler(new_request(0), processors=[processor])
    assert sample(sampler, 0) == [4]
    sampler.end(0)
    sampler.end(0)
    assert processor.calls.count(("leave", 0)) == 1 + processor.calls.count(("join", 0))
    sampler.join(new_request(0, extra_args={}))
    assert sample(sampler, 0) == [0]
    sampler.join(new_request(0, [1, 2, 7, 8], num_prompt=2))  # resumed after a preemption
    assert sample(sampler, 0) == [9]


def test_logits_processors_run_after_penalties_and_before_the_temperature():
    processor = Watched()
    request = new_request(
        tokens=[1, 5],
        allowed_token_ids=[1, 2, 6],
        logit_bias={2: 3.0},
        repetition_penalty=2.0,
        temperature=0.5,
    )
    sample(new_sampler(request, processors=[processor]), 0)
    (logits,) = processor.seen[0].tolist()
    best = descending_logits()[0].tolist()
    assert [index for index, value in enumerate(logits) if value != -torch.inf] == [1, 2, 6]
    assert (logits[1], logits[2], logits[6]) == (best[1] / 2, best[2] + 3, best[6])


def test_logits_processors_run_in_the_configured_order():
    first, second = Watched(), Watched()
    assert sample(new_sampler(new_request(), processors=[second, first]), 0) == [4]
    assert second.order < first.order
    assert first.seen[0][0, 4] == second.seen[0][0, 4] + 1000


def test_a_request_with_a_logits_processor_does_not_use_the_greedy_fast_path():
    """The row has no mask anymore, but its processor prevents the fast path."""
    request = new_request(min_tokens=1, stop=[11])
    sampler = new_sampler(request, processors=[Watched()])
    assert [sample(sampler, 0) for _ in range(4)] == [[4], [5], [6], [7]]


def test_the_logits_that_a_processor_returns_are_used():
    class Fresh(Watched):
        def apply(self, logits_SV, rows):
            return super().apply(logits_SV.clone(), rows)

    assert sample(new_sampler(new_request(), processors=[Fresh()]), 0) == [4]


def test_reading_the_distribution_applies_processors_and_changes_no_state():
    sampler = new_sampler(new_request(temperature=1.0), processors=[Watched()])
    probs = sampler.distribution(descending_logits(), [0])
    assert probs[0, 4] == 1.0
    assert torch.equal(sampler.distribution(descending_logits(), [0]), probs)
    assert sample(sampler, 0) == [4]


def test_a_logits_processor_that_raises_ends_only_the_affected_request():
    class Broken(Watched):
        def apply(self, logits_SV, rows):
            if 1 in rows:
                raise ValueError("no")
            return super().apply(logits_SV, rows)

    sampler = new_sampler(new_request(0), new_request(1, [9, 8]), processors=[Broken()])
    assert sample(sampler, 0, 1) == [4, 0]
    assert list(sampler.extensions.errors) == [1]
    assert "0 failed in logits: ValueError: no" in sampler.extensions.errors[1]
    assert sample(sampler, 0, 1) == [5, 0]


def test_the_torch_worker_declares_logits_processors():
    assert "logits_processors" in TorchWorker.provides
