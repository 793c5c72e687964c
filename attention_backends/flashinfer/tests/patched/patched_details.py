"""Cases that the contract suite does not cover: plans, kernels, sinks, strides, cleared slots.

test_flashinfer_attention.py starts these tests in a separate process.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import reference_kernels
import torch
from cpu_backends import BACKENDS, BlackwellOnCpu, HopperOnCpu, OnCpu
from random_steps import RUNS, SPEC, B, D, H, Step, attended
from reference_attention import calls

from dovetail.errors import ConfigError, ContractError
from dovetail_attn_flashinfer import wrappers
from dovetail_attn_flashinfer.wrappers import PlannedWrapper


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    """Discard the state that a new process would not have: launches and loaded sink kernels."""
    monkeypatch.setattr(wrappers, "_sink_kernels", {})
    reference_kernels.loaded_variants.clear()
    calls.clear()


def test_layers_of_equal_shape_share_the_plans_of_a_step():
    step = Step()
    scales = (0.2, 0.2, 0.3)
    layers = [step.layer(scale=scale) for scale in scales]
    builder = step.builder()
    for num_plans in (4, 8):  # two shapes, two parts
        metadata = builder.build(step.batch())
        for layer, scale in zip(layers, scales, strict=True):
            step.check(step.attend(layer, metadata), scale=scale)
        assert sum("plan" in name for name, _ in calls) == num_plans
    assert len({id(x["int_workspace_buffer"]) for n, x in calls if "plan" in n}) == 4


def test_layers_with_different_soft_caps_or_sinks_have_separate_plans():
    step = Step()
    metadata = step.builder().build(step.batch())
    sinks = torch.zeros(H)
    for changes in ({}, {"soft_cap": 2.0}, {"sinks": sinks}, {"soft_cap": 2.0, "sinks": sinks}):
        step.check(step.attend(step.layer(**changes), metadata), **changes)
    assert sum("plan" in name for name, _ in calls) == 8


@pytest.mark.parametrize(
    ("backend", "names"),
    [
        (OnCpu, ["plan fa2", "plan fa2", "run fa2", "run fa2"]),
        (HopperOnCpu, ["plan fa2", "plan fa3", "run fa2", "run fa3"]),
        (BlackwellOnCpu, ["decode", "context"]),
    ],
)
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 2, H)])
def test_decodes_and_prefills_use_the_kernels_for_the_device(backend, names, sinks):
    assert attended(Step(), backend, sinks=sinks) == names


def test_layers_with_a_soft_cap_use_the_wrappers_on_every_device():
    assert attended(Step(), BlackwellOnCpu, soft_cap=3.0) == [*["plan fa2"] * 2, *["run fa2"] * 2]


@pytest.mark.parametrize("runs", [((9, 1), (B, 1)), ((0, 5), (9, 1))])
def test_a_step_makes_one_launch_if_it_has_only_decodes_or_decodes_after_prefills(runs):
    assert attended(Step(runs), OnCpu) == ["plan fa2", "run fa2"]
    calls.clear()
    kernel = "decode" if runs[0][1] == 1 else "context"
    assert attended(Step(runs), BlackwellOnCpu) == [kernel]


def test_unsupported_block_sizes_use_the_flashinfer_wrappers_on_blackwell():
    spec = replace(SPEC, block_size=48)
    assert Step(spec=SPEC).builder(BlackwellOnCpu)._kernels.trtllm is not None
    assert Step(spec=spec).builder(BlackwellOnCpu)._kernels.trtllm is None


def test_the_kernels_option_selects_the_flashinfer_wrappers():
    assert Step().builder(BlackwellOnCpu, kernels="fa2")._kernels.trtllm is None
    with pytest.raises(ConfigError, match=r"needs compute capability 9\.0"):
        Step().builder(OnCpu, kernels="fa3")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_wrappers_get_lengths_on_the_host_and_block_ids_on_the_device(backend):
    attended(Step(), backend, soft_cap=2.0)
    runs = [x for name, x in calls if name.startswith("run")]
    assert [x["paged_kv_indices"].tolist() for x in runs] == [[1, 2, 3, 4, 5], [6, 7, 8]]
    assert [x["paged_kv_last_page_len"].tolist() for x in runs] == [[1, 1], [5, 5]]


def test_layers_with_a_second_head_size_do_not_use_the_sink_kernel():
    sinks = torch.linspace(-1, 2, H)
    attended(Step(), sinks=sinks)
    assert all(x["module"].extra for _, x in calls)
    calls.clear()
    spec = replace(SPEC, head_size=128)
    attended(Step(spec=spec), sinks=sinks)
    assert not any(x["module"].extra for _, x in calls)


def test_flashinfer_cannot_load_sink_kernels_for_two_head_sizes_in_one_process():
    """If this fails, FlashInfer has no such limit: remove head sizes from `_sink_kernels`."""
    attended(Step(), sinks=torch.zeros(H))
    wrappers._sink_kernels.clear()
    with pytest.raises(ValueError, match="is loaded with different sizes"):
        attended(Step(spec=replace(SPEC, head_size=128)), sinks=torch.zeros(H))


def test_sinks_may_be_loaded_after_the_layer_is_created():
    for backend in BACKENDS:
        step, sinks = Step(), torch.zeros(H)
        layer = step.layer(backend, sinks=sinks)
        sinks.copy_(torch.linspace(-2, 3, H))
        step.check(step.attend(layer, step.builder(backend).build(step.batch())), sinks=sinks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_queries_and_results_are_supported(backend):
    step = Step()
    memory = torch.full((sum(n for _, n in RUNS), H, 2 * D), torch.nan, dtype=torch.bfloat16)
    out = memory[..., :D]
    step.attend(step.layer(backend), step.builder(backend).build(step.batch()), out)
    step.check(out)
    assert memory[..., D:].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [0, 5])
def test_requests_without_scheduled_tokens_are_not_launched(backend, window):
    runs = ((B, 1), (3, 0), (2, 3), (2 * B, 0), (7, 1))
    attended(Step(runs, replace(SPEC, sliding_window=window)), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_without_tokens_does_nothing(backend):
    assert attended(Step(((3, 0),)), backend) == []


def test_unused_slots_are_cleared_for_kernels_that_read_whole_blocks():
    step = Step(((B, 1), (B + 2, 1), (3, B), (0, B)))
    before = step.cache.clone()
    attended(step, BlackwellOnCpu)
    changed = ~(step.cache == before) & ~(step.cache.isnan() & before.isnan())
    slots_KV = changed.transpose(2, 3).flatten(3).any(3)  # blocks, keys or values, slots
    new = {(block, slot): True for block, slot in ((2, 0), (4, 2))}
    new |= {(5, slot): True for slot in range(3, B)} | {(6, slot): True for slot in range(3)}
    new |= {(7, slot): True for slot in range(B)}
    cleared = {(2, slot) for slot in range(1, B)} | {(4, slot) for slot in range(3, B)}
    cleared |= {(6, slot) for slot in range(3, B)}
    assert {tuple(x) for x in slots_KV[:, 0].nonzero().tolist()} == set(new)
    assert {tuple(x) for x in slots_KV[:, 1].nonzero().tolist()} == set(new) | cleared
    assert all(not step.cache[block, 1, :, slot].any() for block, slot in cleared)


def test_the_fa2_path_does_not_clear_slots():
    step = Step()
    attended(step, OnCpu)
    assert step.cache[7, 1, :, 5:].isnan().all()


def test_a_layer_that_differs_from_its_group_is_reported():
    step = Step()
    layer = step.layer(sliding_window=5)
    with pytest.raises(ContractError, match=r"layers\.3\.attn has .* = \(5, 2, 64\)"):
        step.attend(layer, step.builder().build(step.batch()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_may_run_outside_of_inference_mode_after_a_step_in_inference_mode(backend):
    step, sinks = Step(), torch.zeros(H)
    builder, layer = step.builder(backend), step.layer(backend, sinks=sinks)
    with torch.inference_mode():
        step.attend(layer, builder.build(step.batch()))
    step.check(step.attend(layer, builder.build(step.batch())), sinks=sinks)


class Recorder:
    """A wrapper and an event that record their calls."""

    def __init__(self, error=None):
        self.names, self.error = [], error

    def plan(self):
        self.names.append("plan")
        if self.error:
            raise self.error

    def record(self):
        self.names.append("record")

    def synchronize(self):
        self.names.append("synchronize")


def test_a_plan_waits_until_the_copy_of_the_previous_plan_has_ended():
    recorder = Recorder()
    planned = PlannedWrapper(recorder, recorder)
    planned.plan()
    planned.plan()
    assert recorder.names == ["plan", "record", "synchronize", "plan", "record"]


def graph_steps(sizes=(4, 2)):
    """Return steps of decodes with 4 and 2 requests, and a builder that supports more."""
    steps = [Step(((2 * B + 3, 1), (B, 1), (5, 1), (B - 1, 1))[:size]) for size in sizes]
    return steps, steps[0].builder()


def test_graphs_of_all_sizes_share_the_page_list_and_the_memory_of_plans():
    steps, builder = graph_steps()
    layers = [steps[0].layer(scale=scale) for scale in (0.2, 0.3)]
    wrappers_of = []
    for step in steps:
        metadata = builder.build_for_graph(step.batch())
        for layer in layers:
            step.attend(layer, metadata)
            (launch,) = metadata.plan(layer._shape).launches
            wrappers_of.append(launch.wrapper)
    assert len({id(item) for item in wrappers_of}) == 4
    assert len({item._paged_kv_indices_buf.data_ptr() for item in wrappers_of}) == 1
    assert len({item._int_workspace_buffer.data_ptr() for item in wrappers_of}) == 2
    assert len({item._paged_kv_indptr_buf.data_ptr() for item in wrappers_of}) == 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("changes", [{}, {"sinks": torch.linspace(-1, 2, H)}, {"soft_cap": 2.0}])
@pytest.mark.parametrize("window", [0, 5])
def test_a_graph_keeps_its_launches_and_addresses(backend, changes, window):
    step = Step(((2 * B + 3, 1), (B, 1), (5, 1)), replace(SPEC, sliding_window=window))
    layer, builder = step.layer(backend, **changes), step.builder(backend)
    batch = step.batch()
    metadata = builder.build_for_graph(replace(batch, seq_lens=[3 * B] * 3))
    launches = metadata.plan(layer._shape).launches
    builder.update_for_replay(metadata, batch)
    step.check(step.attend(layer, metadata), **changes)
    assert metadata.plan(layer._shape).launches is launches


def test_a_workspace_that_is_too_small_for_a_graph_does_not_stop_the_engine():
    text = "Buffer overflow when allocating memory. Increase the workspace buffer size."
    with pytest.raises(RuntimeError, match="too small for graphs of 8 requests; increase its opt"):
        PlannedWrapper(Recorder(RuntimeError(text)), None, 8).plan()


def test_a_workspace_that_is_too_small_is_reported():
    text = "Buffer overflow when allocating memory. Increase the workspace buffer size."
    with pytest.raises(ConfigError, match="increase its option workspace_mib"):
        PlannedWrapper(Recorder(RuntimeError(text)), None).plan()
    with pytest.raises(RuntimeError, match="another cause"):
        PlannedWrapper(Recorder(RuntimeError("another cause")), None).plan()


def test_the_flashinfer_wrappers_ignore_their_sinks_argument():
    """The kernels of FA2 and FA3 have no sinks; the reference raises where they ignore them."""
    step = Step(((B, 1), (B, 1)))
    layer = step.layer()
    metadata = step.builder().build(step.batch())
    step.attend(layer, metadata)
    (launch,) = metadata.plan(layer._shape).launches
    q = torch.zeros(2, H, D, dtype=torch.bfloat16)
    launch.wrapper.run(q, step.cache, enable_pdl=False)
    with pytest.raises(ValueError, match="sinks is ignored"):
        launch.wrapper.run(q, step.cache, enable_pdl=False, sinks=torch.zeros(H))
