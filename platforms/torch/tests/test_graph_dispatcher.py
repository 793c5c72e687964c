"""The dispatcher captures or replays steps with a fake provider, or runs them eagerly."""

import logging

import pytest
import torch

from dovetail_torch.graph_dispatcher import GraphDispatcher
from dovetail_torch.graph_provider import BatchDescriptor, Capture

D, V, MAX = 3, 5, 8


class Model:
    """A model that doubles its inputs. `runs` counts its calls."""

    def __init__(self):
        self.runs, self.factor = 0, 2.0

    def forward(self, input_ids_T, positions_T, attention):
        self.runs += 1
        return (input_ids_T + positions_T)[:, None] * torch.full((D,), self.factor)

    def compute_logits(self, hidden_SD):
        return hidden_SD.sum(-1, keepdim=True) + torch.arange(V)


class Kept:
    def __init__(self, forward, outputs):
        self.forward, self.outputs, self.replays = forward, outputs, 0

    def replay(self):
        self.replays += 1
        for output, fresh in zip(self.outputs, self.forward(), strict=True):
            output.copy_(fresh)


class Provider:
    """A fake provider that replays a graph by running the model again. response: fields of its
    captures."""

    def __init__(self, **response):
        self.answer, self.captured = response, []

    def key(self, descriptor):
        if descriptor.num_tokens > MAX:
            return None
        return descriptor.num_tokens, descriptor.uniform, descriptor.greedy

    def run(self, forward):
        return forward()

    def capture(self, forward):
        outputs = forward()
        self.captured.append(len(outputs[0]))
        if self.answer:
            return Capture(outputs=outputs, **self.answer)
        return Capture(outputs=outputs, graph=Kept(forward, outputs))


IDS, POSITIONS = torch.zeros(16, dtype=torch.int64), torch.arange(16)


def step(dispatcher, model, num_tokens, *, uniform=True):
    """Run a step with new inputs, compare it with the model, and return how often the model ran."""
    IDS[:num_tokens] = torch.randint(100, (num_tokens,))
    ids_T, positions_T = IDS[:num_tokens], POSITIONS[:num_tokens]
    before = model.runs
    descriptor = BatchDescriptor(num_tokens=num_tokens, num_requests=1, uniform=uniform)
    outputs = dispatcher.run(ids_T, positions_T, None, descriptor)
    cost = model.runs - before
    hidden_TD = model.forward(ids_T, positions_T, None)
    assert torch.equal(outputs[0], hidden_TD)
    assert len(outputs) == 1 + uniform
    if uniform:
        assert torch.equal(outputs[1], model.compute_logits(hidden_TD))
    return cost


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(11)


def test_a_step_shape_is_executed_then_captured_then_verified_then_replayed():
    model, provider = Model(), Provider()
    dispatcher = GraphDispatcher(model, provider)
    costs = [step(dispatcher, model, 4) for _ in range(5)]
    assert costs == [1, 1, 2, 1, 1]  # each replay of this provider runs the model once
    assert provider.captured == [4]
    counts = dispatcher.counts
    assert (counts.eager, counts.captured, counts.replayed) == (2, 1, 2)


def test_graphs_are_verified_once_with_and_once_without_the_lm_head():
    model, provider = Model(), Provider()
    dispatcher = GraphDispatcher(model, provider)
    for size in (2, 3):
        for uniform in (True, False):
            for _ in range(3):
                step(dispatcher, model, size, uniform=uniform)
    assert provider.captured == [2, 2, 3, 3]
    assert dispatcher.counts.replayed == 2


def test_a_graph_includes_sampling_if_all_requests_use_greedy_sampling():
    model, provider = Model(), Provider()
    dispatcher = GraphDispatcher(model, provider, lambda logits_TV: logits_TV.argmin(-1))
    descriptor = BatchDescriptor(num_tokens=2, num_requests=2, uniform=True, greedy=True)
    for _ in range(4):
        IDS[:2] = torch.randint(100, (2,))
        hidden_TD, logits_TV, best_T = dispatcher.run(IDS[:2], POSITIONS[:2], None, descriptor)
        assert torch.equal(logits_TV, model.compute_logits(hidden_TD))
        assert best_T.tolist() == logits_TV.argmin(-1).tolist()
    assert dispatcher.counts.replayed == 1
    step(dispatcher, model, 2)  # other batches of the same size have no tokens


def test_a_shape_is_reported_as_replayed_after_its_verification():
    model, provider = Model(), Provider()
    dispatcher = GraphDispatcher(model, provider)
    descriptor = BatchDescriptor(num_tokens=4, num_requests=1, uniform=True)
    for _ in range(3):
        assert dispatcher.replay(descriptor) is None
        step(dispatcher, model, 4)
    IDS[:4] = torch.arange(4)
    hidden_TD, logits_TV = dispatcher.replay(descriptor)
    assert torch.equal(hidden_TD, model.forward(IDS[:4], POSITIONS[:4], None))
    assert torch.equal(logits_TV, model.compute_logits(hidden_TD))
    assert GraphDispatcher(model, None).replay(descriptor) is None


def test_without_a_provider_or_a_key_every_step_is_eager():
    model, provider = Model(), Provider()
    for dispatcher, size in (
        (GraphDispatcher(model, None), 2),
        (GraphDispatcher(model, provider), 9),
    ):
        assert [step(dispatcher, model, size) for _ in range(4)] == [1] * 4
        assert dispatcher.counts.eager == 4
    assert provider.captured == []


def test_a_permanent_capture_error_is_logged_once_and_ends_all_captures(caplog):
    model, provider = Model(), Provider(failure_reason="the operation aten::frob")
    dispatcher = GraphDispatcher(model, provider)
    for size in (2, 2, 2, 3, 3, 3):
        assert step(dispatcher, model, size) == 1
    assert provider.captured == [2]
    warnings = [entry for entry in caplog.records if entry.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "aten::frob" in warnings[0].getMessage()
    assert "Model" in warnings[0].getMessage()


def test_a_temporary_capture_error_affects_only_its_shape():
    model, provider = Model(), Provider(failure_reason="too large", permanent=False)
    dispatcher = GraphDispatcher(model, provider)
    for size in (2, 2, 2, 2, 3, 3, 3):
        step(dispatcher, model, size)
    assert provider.captured == [2, 3]


def test_a_graph_whose_replay_differs_is_never_used(caplog):
    model, provider = Model(), Provider()
    dispatcher = GraphDispatcher(model, provider)
    step(dispatcher, model, 2)
    step(dispatcher, model, 2)
    graph, _ = next(iter(dispatcher._entries.values()))
    graph.replay = lambda: None  # as if the replay had read freed memory
    for _ in range(3):
        step(dispatcher, model, 2)  # the result is correct
    assert dispatcher.counts.replayed == 0
    assert "different results" in caplog.text
