"""Graphs of steps on the fake device: equal tokens, fixed addresses, and reasons to run eagerly."""

import gc
import logging
from dataclasses import replace
from functools import partial

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail_devkit.suites.attention import check_attention
from dovetail_devkit.tiny_model import write_tiny_llama
from dovetail_torch.accelerator.graphs import AcceleratorGraphs
from dovetail_torch.fake_device import DEVICE, NAME, FlightError, install
from dovetail_torch.fake_device.attention import (
    GraphAttentionBackend,
    GraphBuilder,
    NoWaitAttentionBackend,
    NoWaitBuilder,
)
from dovetail_torch.fake_device.platform import FakeDevicePlatform
from dovetail_torch.fake_device.virtual_memory import FakeVirtualMemory
from dovetail_torch.fake_device.worker import FakeDeviceWorker
from dovetail_torch.graphs.plan import GraphOptions, graph_sizes
from dovetail_torch.graphs.step_graphs import StepGraphs

pytest.importorskip("dovetail_models")
PROMPTS = [[5, 9, 2, 7, 7, 1], [3], list(range(20)), [8] * 9, [4, 4]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=9),
    SamplingParams(temperature=1.2, seed=3, max_tokens=12),
    SamplingParams(temperature=1.0, top_k=7, top_p=0.9, min_p=0.01, seed=4, max_tokens=12),
    SamplingParams(temperature=0, max_tokens=9, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0, max_tokens=5, frequency_penalty=0.5),
]


@pytest.fixture(autouse=True)
def device():
    install()
    DEVICE.reset(lag=20, seed=1)
    yield torch.device(NAME, 0)
    DEVICE.reset()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def generate(checkpoint, attention=GraphAttentionBackend, **options):
    """Return the tokens and log-probabilities of all prompts, and the counts of steps."""
    sizes = {"max_model_len": 64, "block_size": 4, "max_num_seqs": 3, "dtype": "float32"}
    engine_args = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 60, "num_threads": 1}
    parts = {"platform": FakeDevicePlatform, "worker_cls": FakeDeviceWorker}
    llm = LLM(checkpoint, **sizes, **engine_args, **parts, attention_backend=attention, **options)
    with llm:
        outputs = [item.outputs[0] for item in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        counts = llm.llm_engine.client.core.executor._worker._runner.graph_counts
    return [(list(output.token_ids), output.cumulative_logprob) for output in outputs], counts


@pytest.fixture(scope="module")
def expected(checkpoint):
    install()
    DEVICE.reset()
    return generate(checkpoint, enforce_eager=True)[0]


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("mode", ["full_and_piecewise", "full", "piecewise"])
def test_replayed_steps_generate_the_same_tokens_as_eager_steps(checkpoint, expected, mode, ahead):
    actual, counts = generate(checkpoint, graph_mode=mode, async_scheduling=ahead)
    assert [tokens for tokens, _ in actual] == [tokens for tokens, _ in expected]
    assert counts.replayed > 10
    assert (counts.eager > 0) == (mode == "full")  # only the steps with prompts
    DEVICE.check()


@pytest.mark.costly
@pytest.mark.sampled(12)
@pytest.mark.parametrize("mode", ["full", "piecewise"])
@pytest.mark.parametrize("level", ["as_is", "once", "piecewise"])
def test_graphs_capture_compiled_code(checkpoint, expected, level, mode):
    compilation = {"compile_level": level, "compile_backend": "eager", "compile_cache": "off"}
    actual, counts = generate(checkpoint, graph_mode=mode, **compilation)
    assert [tokens for tokens, _ in actual] == [tokens for tokens, _ in expected]
    assert counts.replayed > 10
    DEVICE.check()


@pytest.mark.costly
@pytest.mark.parametrize("options", [{"graph_mode": "none"}, {"enforce_eager": True}])
def test_without_graphs_every_step_runs_eagerly(checkpoint, expected, options):
    actual, counts = generate(checkpoint, **options)
    assert actual == expected
    assert (counts.captured, counts.replayed) == (0, 0)


@pytest.mark.costly
def test_steps_above_the_maximum_size_run_eagerly(checkpoint, expected):
    actual, counts = generate(checkpoint, graph_mode="full", max_graph_size=2)
    assert [tokens for tokens, _ in actual] == [tokens for tokens, _ in expected]
    assert counts.captured == 2 and counts.replayed and counts.eager > 10


@pytest.mark.costly
def test_attention_without_support_for_graphs_runs_between_graphs(checkpoint, expected, caplog):
    caplog.set_level(logging.WARNING, logger="dovetail_torch")
    actual, counts = generate(checkpoint, NoWaitAttentionBackend)
    assert [tokens for tokens, _ in actual] == [tokens for tokens, _ in expected]
    assert counts.replayed > 10
    assert "'no_wait' does not support graphs, so attention runs between graphs" in caplog.text


class Waits(GraphAttentionBackend):
    """An attention backend whose captured layers copy a number to the host."""

    @staticmethod
    def create_layer(context):
        layer = GraphAttentionBackend.create_layer(context)
        forward = layer.forward

        def with_wait(q_THD, *args):
            if DEVICE.watch.capturing is not None:
                q_THD.sum().item()
            forward(q_THD, *args)

        layer.forward = with_wait
        return layer


@pytest.mark.costly
def test_a_failed_capture_is_reported_and_every_step_runs_eagerly(checkpoint, expected, caplog):
    caplog.set_level(logging.WARNING, logger="dovetail_torch")
    actual, counts = generate(checkpoint, Waits, graph_mode="full")
    assert actual == expected and counts.replayed == 0
    assert "runs without graphs of decodes: a capture failed" in caplog.text
    assert "is not allowed while a graph is captured" in caplog.text


@pytest.mark.costly
def test_after_a_failed_capture_of_decodes_attention_runs_between_graphs(
    checkpoint, expected, caplog
):
    caplog.set_level(logging.WARNING, logger="dovetail_torch")
    actual, counts = generate(checkpoint, Waits)
    assert [tokens for tokens, _ in actual] == [tokens for tokens, _ in expected]
    assert counts.replayed > 10 and counts.eager == 0
    assert "runs without graphs of decodes: a capture failed" in caplog.text


@pytest.mark.costly
def test_after_a_failed_capture_of_mixed_steps_decodes_use_graphs(
    checkpoint, expected, caplog, monkeypatch
):
    def fail(graphs, size):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(StepGraphs, "_capture_mixed", fail)
    caplog.set_level(logging.WARNING, logger="dovetail_torch")
    actual, counts = generate(checkpoint)
    assert [tokens for tokens, _ in actual] == [tokens for tokens, _ in expected]
    assert counts.replayed > 10 and counts.eager > 0
    assert "runs without graphs of mixed steps: a capture failed: out of memory" in caplog.text


class Outdated(GraphBuilder):
    """Does not update the lengths of a graph."""

    def update_for_replay(self, metadata, batch):
        pass


class Frozen(GraphBuilder):
    """Builds the metadata of an eager step, which has the lengths of the capture."""

    def build_for_graph(self, batch):
        return replace(batch, seq_lens=batch.seq_lens_R.tolist())

    def update_for_replay(self, metadata, batch):
        pass


@pytest.mark.costly
def test_graph_attention_meets_its_contract():
    check_attention(GraphAttentionBackend, torch.device("cpu"))


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize("builder", [Outdated, Frozen, NoWaitBuilder])
def test_the_suite_rejects_faulty_graph_metadata(builder):
    class Mutant(GraphAttentionBackend):
        @staticmethod
        def create_builder(context):
            return builder()

    with pytest.raises(AssertionError, match="graph"):
        check_attention(Mutant, torch.device("cpu"))


def test_replaying_a_graph_repeats_its_operations_on_the_captured_tensors(device):
    graphs = AcceleratorGraphs(install())
    x, total = torch.ones(3, device=device), torch.zeros(3, device=device)
    with graphs.capturing():
        graphs.begin()
        y = x * 2
        total += y
        graph = graphs.end()
    assert y.isnan().all() and not total.any()
    for _ in range(2):
        graph.replay()
        x.fill_(5)
    assert y.tolist() == [10, 10, 10] and total.tolist() == [12, 12, 12]


@pytest.mark.costly
@pytest.mark.parametrize(("num_frozen", "expected"), [(0, ["freeze", "unfreeze"]), (9, [])])
def test_captures_run_without_the_garbage_collector_and_keep_a_freeze(
    device, monkeypatch, num_frozen, expected
):
    """Freeing a device object may wait. `gc.unfreeze` would undo a `gc.freeze` of the program."""
    calls = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: num_frozen)
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, partial(calls.append, name))
    graphs = AcceleratorGraphs(install())
    with pytest.raises(RuntimeError, match="out of memory"), graphs.capturing():
        assert not gc.isenabled() and calls == expected[:1]
        raise RuntimeError("out of memory")
    assert gc.isenabled() and calls == expected


@pytest.mark.costly
@pytest.mark.parametrize(
    "action",
    [
        lambda x: x.sum().item(),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: torch.ones(3, device=x.device).cpu(),
        lambda x: DEVICE.flights.pinned_zeros(8),
        lambda x: DEVICE.timeline.default.synchronize(),
        lambda x: DEVICE.timeline.default.record_event().synchronize(),
        lambda x: FakeVirtualMemory().reserve(1 << 14).map(),
    ],
)
def test_operations_that_a_graph_cannot_repeat_fail_during_a_capture(device, action):
    graphs, x = AcceleratorGraphs(install()), torch.zeros(3, device=device)
    rejected = pytest.raises(FlightError, match="not allowed while a graph is captured")
    with rejected, graphs.capturing():
        graphs.begin()
        action(x)
    assert DEVICE.watch.capturing is None


def captured(operation):
    """Return a graph of one operation."""
    graphs = AcceleratorGraphs(install())
    with graphs.capturing():
        graphs.begin()
        operation()
        return graphs.end()


def test_a_graph_must_not_use_memory_that_was_freed_after_its_capture(device):
    """A device would read whatever is at the address of the tensor now."""
    total, inputs = torch.zeros(3, device=device), [torch.ones(3, device=device)]
    graph = captured(lambda: total.add_(inputs[0]))
    graph.replay()
    inputs.clear()
    with pytest.raises(FlightError, match="uses device memory that was freed after its capture"):
        graph.replay()


def test_a_graph_keeps_the_memory_that_its_capture_has_allocated(device):
    total, step = torch.zeros(3, device=device), torch.ones(3, device=device)

    def double():
        doubled = step * 2  # freed at the end of the capture
        total.add_(doubled)

    graph = captured(double)
    for _ in range(2):
        graph.replay()
    assert total.tolist() == [4, 4, 4]


def test_an_input_at_a_new_address_is_not_read(device):
    """A graph reads the address of the capture, so a new tensor has no effect."""
    step, total = torch.ones(3, device=device), torch.zeros(3, device=device)
    kept = step
    graph = captured(lambda: total.add_(step))
    step = torch.full((3,), 7.0, device=device)
    graph.replay()
    assert total.tolist() == [1, 1, 1] and step.tolist() == [7, 7, 7] and kept.tolist() == [1, 1, 1]


class Forgetful(GraphBuilder):
    """Attends with lengths in memory that is freed after the capture."""

    def build_for_graph(self, batch):
        metadata = super().build_for_graph(batch)
        return replace(metadata, batch=replace(batch, slot_mapping_T=batch.slot_mapping_T.clone()))

    def update_for_replay(self, metadata, batch):
        super().update_for_replay(metadata, batch)
        object.__setattr__(metadata, "batch", batch)


@pytest.mark.costly
def test_metadata_at_a_new_address_is_detected_in_an_engine(checkpoint):
    class Mutant(GraphAttentionBackend):
        @staticmethod
        def create_builder(context):
            return Forgetful()

    with pytest.raises(Exception, match="uses device memory that was freed after its capture"):
        generate(checkpoint, Mutant, graph_mode="full")
    DEVICE.watch.forget()


def test_graph_sizes_are_dense_for_small_steps():
    assert graph_sizes(GraphOptions(), 3) == (1, 2, 3)
    assert graph_sizes(GraphOptions(max_size=16), 256) == (1, 2, 4, 8, 16)
    sizes = graph_sizes(GraphOptions(), 10_000)
    assert sizes[-1] == 512 and len(sizes) == 51
    assert graph_sizes(GraphOptions(), 0) == ()
