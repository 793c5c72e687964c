"""Cases that the contract suite does not cover: arguments, metadata, graphs, strides, options.

test_flash_attn_attention.py starts these tests in a separate process.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cpu_backends import BACKENDS, IS_FA3, NAME, PROVIDER, OnAmpere, OnCpu, SimulatedGpu
from random_step import DECODES, RUNS, SPEC, B, D, H, K, RandomStep
from reference_kernels import calls

from dovetail.errors import ConfigError, ContractError
from dovetail_attn_flash_attn.providers.call_terms import Call, arguments

FEATURES = OnCpu.capabilities.features
only_fa3 = pytest.mark.skipif(not IS_FA3, reason="not a provider of FlashAttention 3")
only_sinks = pytest.mark.skipif("sinks" not in FEATURES, reason="the provider has no sinks")
KERNELS = {"vllm": "vllm 3", "fa3": "fwd", "flash_attn": "flash_attn", "torch": "torch"}


@pytest.fixture(autouse=True)
def no_earlier_calls():
    calls.clear()


def named(name):
    """Return the arguments of the latest calls of a kernel."""
    return [arguments for kernel, arguments in calls if kernel == name]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_with_prefills_and_decodes_makes_one_kernel_call(backend):
    RandomStep().run(backend)
    assert len([name for name, _ in calls if name != "scheduler_metadata"]) == 1


@pytest.mark.skipif(NAME != "vllm", reason="only vLLM has two versions")
def test_the_vllm_provider_selects_the_flash_attention_version_for_the_gpu():
    RandomStep().run(OnAmpere)
    assert [name for name, _ in calls] == ["vllm 2"]
    RandomStep().run(OnCpu)
    assert [name for name, _ in calls] == ["vllm 2", "scheduler_metadata", "vllm 3"]


@pytest.mark.parametrize(("window", "expected"), [(0, (-1, 0)), (1, (0, 0)), (5, (4, 0))])
def test_the_window_argument_is_a_tuple_and_includes_the_current_token(window, expected):
    RandomStep(spec=replace(SPEC, sliding_window=window)).run()
    (keywords,) = named(KERNELS[NAME])
    if NAME == "fa3":
        assert (keywords["window_size_left"], keywords["window_size_right"]) == expected
        assert keywords["is_causal"] is True
    else:
        window = keywords["window" if NAME == "torch" else "window_size"]
        assert window == expected and isinstance(window, tuple)


def test_the_block_table_omits_the_blocks_before_the_sliding_window():
    step = RandomStep(((3 * B, 1), (B + 2, 3)), replace(SPEC, sliding_window=2))
    metadata = step.builder().build(step.batch())
    assert metadata.step.table_RM.tolist() == [[3, 4], [6, 0]]
    assert metadata.step.key_lens_R.tolist() == [B + 1, 5]
    assert metadata.step.cu_key_lens_R1.tolist() == [0, B + 1, B + 6]
    step.check(step.attend(step.layer(), metadata))


def test_a_step_without_a_sliding_window_does_not_copy_the_block_table():
    step = RandomStep()
    layout = step.builder().build(step.batch()).step
    assert layout.table_RM.data_ptr() == step.table_RM.data_ptr()
    assert layout.table_RM.shape == (4, 3)  # as wide as the row with the most blocks
    assert layout.max_key_len == 3 * B


@only_fa3
def test_layers_of_equal_shape_share_the_scheduler_metadata_of_a_step():
    step = RandomStep()
    layers = [step.layer(), step.layer(), step.layer(scale=0.3)]
    builder = step.builder()
    for num_calls in (2, 4):
        metadata = builder.build(step.batch())
        for layer, scale in zip(layers, (0.2, 0.2, 0.3), strict=True):
            step.check(step.attend(layer, metadata), scale=scale)
        assert len(named("scheduler_metadata")) == num_calls


def test_a_captured_step_has_fixed_addresses_and_a_fixed_number_of_splits():
    step = RandomStep(DECODES, replace(SPEC, sliding_window=5))
    batch = step.batch()
    metadata = step.builder(graph_splits=7).build_for_graph(batch)
    layer = step.layer()
    step.check(step.attend(layer, metadata))
    layout = metadata.step
    tensors = [layout.table_RM, layout.key_lens_R, layout.cu_key_lens_R1, *layout.slots()]
    kept = [tensor.data_ptr() for tensor in tensors]
    before = layout.key_lens_R.clone()
    batch.seq_lens_R.sub_(1)
    builder = step.builder(graph_splits=7)
    builder.update_for_replay(metadata, replace(batch, seq_lens=[2 * B, B - 1, 0]))
    tensors = [layout.table_RM, layout.key_lens_R, layout.cu_key_lens_R1, *layout.slots()]
    assert [tensor.data_ptr() for tensor in tensors] == kept
    assert not torch.equal(layout.key_lens_R, before)
    assert layout.cu_key_lens_R1.diff().tolist() == layout.key_lens_R.tolist()
    if IS_FA3:
        (keywords,) = named(KERNELS[NAME])
        assert keywords["num_splits"] == 7
        assert (
            metadata.scheduler_metadata(PROVIDER, layer._shape)[:3].tolist()
            == layout.key_lens_R.tolist()
        )
        assert keywords["scheduler_metadata"].data_ptr() == (
            metadata.scheduler_metadata(PROVIDER, layer._shape).data_ptr()
        )


@only_fa3
def test_the_reference_kernel_rejects_stale_scheduler_metadata():
    step = RandomStep(DECODES)
    batch = step.batch()
    metadata = step.builder().build_for_graph(batch)
    step.attend(step.layer(), metadata)
    batch.seq_lens_R.add_(1)
    with pytest.raises(ValueError, match="the metadata belong to another call"):
        step.attend(step.layer(), metadata)


@only_fa3
@pytest.mark.parametrize("size", [128, 256])
def test_slots_after_the_last_token_are_cleared_if_a_kernel_loads_whole_blocks(size):
    step = RandomStep(((size, 1), (3, size)), replace(SPEC, block_size=size))
    before = step.cache.clone()
    step.run()
    changed = (~(step.cache == before) & ~(step.cache.isnan() & before.isnan())).flatten(3).any(3)
    new = {(2, 0)} | {(3, slot) for slot in range(3, size)} | {(4, slot) for slot in range(3)}
    cleared = {(2, slot) for slot in range(1, size)} | {(4, slot) for slot in range(3, size)}
    assert {tuple(x) for x in changed[1:, 0].nonzero().add(torch.tensor([1, 0])).tolist()} == new
    values = {tuple(x) for x in changed[1:, 1].nonzero().add(torch.tensor([1, 0])).tolist()}
    assert values == new | cleared


@only_fa3
def test_the_reference_reads_whole_blocks_like_the_kernel(monkeypatch):
    step = RandomStep(((3, 128),), replace(SPEC, block_size=128))
    monkeypatch.setattr(type(PROVIDER), "reads_whole_pages", lambda *args: False)
    layer = step.layer()
    assert step.attend(layer, step.builder().build(step.batch())).isnan().any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_slots_are_cleared_if_the_kernel_does_not_load_whole_blocks(backend):
    step = RandomStep()
    step.run(backend)
    assert step.cache[7, 1, 5:].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_queries_and_results_are_supported(backend):
    step = RandomStep()
    memory = torch.full((sum(n for _, n in RUNS), H, 2 * D), torch.nan, dtype=torch.bfloat16)
    out = memory[..., :D]
    step.attend(step.layer(backend), step.builder(backend).build(step.batch()), out)
    step.check(out)
    assert memory[..., D:].isnan().all()


def test_decodes_with_grouped_query_heads_return_correct_results():
    """For a maximum of one query, torch's FlashAttention 2 would write the result to a copy."""
    RandomStep(DECODES).run()
    if NAME == "torch":
        assert named("torch")[0]["max_q"] == 2


def test_a_step_without_tokens_does_nothing():
    step = RandomStep(((0, 1),))
    metadata = step.builder().build(step.batch())
    empty = torch.empty(0, H, D, dtype=torch.bfloat16)
    step.layer().forward(empty, empty[:, :K], empty[:, :K], step.cache, metadata, empty)
    assert not calls


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_may_be_prepared_outside_of_inference_mode(backend):
    step = RandomStep(DECODES, replace(SPEC, sliding_window=5))
    builder, layer = step.builder(backend), step.layer(backend)
    with torch.inference_mode():
        metadata = builder.build_for_graph(step.batch())
        step.attend(layer, metadata)
    builder.update_for_replay(metadata, step.batch())
    step.check(step.attend(layer, metadata))


@only_sinks
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sinks_may_be_loaded_after_the_layer_is_created(dtype):
    step, sinks = RandomStep(spec=replace(SPEC, dtype=dtype)), torch.zeros(H)
    layer = step.layer(sinks=sinks)
    sinks.copy_(torch.linspace(-2, 3, H))
    step.check(step.attend(layer, step.builder().build(step.batch())), sinks=sinks)


@only_sinks
def test_sinks_of_float16_layers_are_not_rounded_to_bfloat16():
    RandomStep(spec=replace(SPEC, dtype="float16")).run(sinks=torch.linspace(-2, 3, H))
    (keywords,) = named(KERNELS[NAME])
    assert keywords["sinks" if NAME == "fa3" else "s_aux"] is None


def test_unsupported_features_are_never_ignored():
    """The selection rejects such layers. A provider without a name for the argument raises, too."""
    step = RandomStep()
    metadata = step.builder().build(step.batch())
    for changes, text in (({"soft_cap": 2.0}, "soft cap"), ({"sinks": torch.zeros(H)}, "sinks")):
        recorded = {}

        class Recorder:
            def forward(self, shape, step, tensors, scheduler_metadata, recorded=recorded):
                recorded["call"] = Call(shape=shape, step=step, tensors=tensors)

            def has_scheduler_metadata(self, shape):
                return False

            def reads_whole_pages(self, shape, step):
                return False

        layer = step.layer()
        context = step.layer_context(**changes)
        layer._context, layer._provider = context, Recorder()
        layer._shape = replace(layer._shape, soft_cap=context.soft_cap)
        step.attend(layer, metadata)
        with pytest.raises(ContractError, match=f"does not support the {text} of a layer"):
            arguments({"queries": "q"}, recorded["call"])


def test_a_layer_that_differs_from_its_group_is_reported():
    step = RandomStep()
    layer = step.layer(sliding_window=5)
    with pytest.raises(ContractError, match=r"layers\.3\.attn has .* = \(5, 2, 64\)"):
        step.attend(layer, step.builder().build(step.batch()))


def test_the_provider_option_is_enforced():
    step = RandomStep()
    step.builder(provider=NAME)
    with pytest.raises(ConfigError, match=r"with the option provider='"):
        step.builder(provider="torch" if NAME != "torch" else "fa3")


@pytest.mark.skipif(NAME not in ("flash_attn", "torch"), reason="supports all block sizes")
@pytest.mark.parametrize("size", [16, 128])
def test_small_blocks_are_rejected(size):
    step = RandomStep(spec=replace(SPEC, block_size=size))
    text = f"provider '{NAME}': block size {size} .* set block_size to a multiple of 256"
    with pytest.raises(ConfigError, match=text):
        step.builder()


@pytest.mark.parametrize(
    ("capability", "text"),
    [
        (75, r"the GPU has compute capability 7\.5, but the kernels need (8\.0 or newer|9\.0)"),
        (100, r"the GPU has compute capability 10\.0, but the kernels need 9\.0"),
    ],
)
def test_gpus_that_the_kernels_do_not_support_are_rejected(capability, text):
    class OnOther(OnCpu):
        devices = SimulatedGpu(capability)

    step = RandomStep()
    if capability > 90 and NAME != "fa3":
        step.run(OnOther)
        return
    for create in (step.builder, step.layer):
        with pytest.raises(ConfigError, match=text):
            create(OnOther)


@pytest.mark.parametrize("backend", BACKENDS)
def test_features_that_the_provider_does_not_have_are_rejected(backend):
    step = RandomStep()
    for feature, changes in (
        ("soft_cap", {"soft_cap": 2.0}),
        ("sinks", {"sinks": torch.zeros(H)}),
    ):
        if feature in backend.capabilities.features:
            step.run(backend, **changes)
        else:
            with pytest.raises(ConfigError, match=f"{feature} is not supported: install"):
                step.layer(backend, **changes)


@pytest.mark.skipif(NAME != "vllm", reason="other providers have no such limit")
def test_layers_with_sinks_and_too_many_heads_are_rejected():
    with pytest.raises(ConfigError, match="at most 64 query heads"):
        RandomStep().layer(sinks=torch.zeros(128), num_heads=128)


@pytest.mark.skipif(NAME != "fa3", reason="other providers have kernels for all head sizes")
@pytest.mark.parametrize("size", [80, 96])
def test_head_sizes_without_kernels_are_rejected(size):
    with pytest.raises(ConfigError, match=f"head size {size} is not supported; supported"):
        RandomStep().layer(head_size=size)
