"""A worker's life cycle on the fake device: contract, memory, errors, tokens, faults."""

import gc

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.errors import CapacityError, DovetailError, PluginError
from dovetail.plugins import PluginRegistry
from dovetail_devkit.contexts import make_config, make_worker_context
from dovetail_devkit.suites.worker import check_worker
from dovetail_devkit.tiny_model import write_tiny_llama
from dovetail_devkit.worker.harness import WorkerHarness
from dovetail_devkit.worker.start import bring_up
from dovetail_torch.accelerator.queues import AcceleratorQueues
from dovetail_torch.accelerator.runtime import AcceleratorRuntime
from dovetail_torch.fake_device import DEVICE, NAME, FlightError, HiddenWaitError, install
from dovetail_torch.fake_device.attention import NoWaitAttentionBackend
from dovetail_torch.fake_device.module import FakeDeviceModule
from dovetail_torch.fake_device.platform import FakeDevicePlatform
from dovetail_torch.fake_device.runtime import FakeDeviceRuntime
from dovetail_torch.fake_device.worker import FakeDeviceWorker
from dovetail_torch.runner import loaded_model

pytest.importorskip("dovetail_models")
MIB = 1 << 20
PARTS = {"attention_backend": NoWaitAttentionBackend}


@pytest.fixture(autouse=True)
def device():
    install()
    DEVICE.reset()
    yield DEVICE
    DEVICE.reset()


@pytest.fixture
def checkpoint(tmp_path):
    return write_tiny_llama(tmp_path)


def context_of(checkpoint, **options):
    return make_worker_context(checkpoint, FakeDevicePlatform(), **(PARTS | options))


@pytest.mark.costly
def test_the_worker_meets_its_contract_without_hidden_waits(checkpoint):
    check_worker(FakeDeviceWorker, context_of(checkpoint))
    DEVICE.check()
    assert DEVICE.watch.waits > 100


class ContextAware(FakeDeviceRuntime):
    """A runtime whose driver reports 50 MiB more free memory before torch uses the device."""

    def free_bytes_by_uuid(self):
        return {"": DEVICE.memory.free_bytes + 50 * MIB}


def test_the_memory_of_the_device_context_counts_as_memory_in_use():
    runtime, aware = FakeDeviceRuntime(), ContextAware()
    for item in (runtime, aware):
        item.activate(0, num_threads=None)
    assert aware.memory_in_use_bytes() - runtime.memory_in_use_bytes() == 50 * MIB


def test_torch_reports_the_free_memory_if_the_driver_does_not(monkeypatch):
    def reject(self, device=None):
        raise RuntimeError("the device does not support querying the available free memory")

    monkeypatch.setattr(FakeDeviceModule, "mem_get_info", reject)
    runtime = FakeDeviceRuntime()
    runtime.activate(0, num_threads=None)
    before = runtime.memory_in_use_bytes()
    x = torch.zeros(3 * MIB, dtype=torch.uint8, device=NAME)
    assert runtime.memory_in_use_bytes() - before == 3 * MIB
    del x


class LargeWorkspaceBackend(NoWaitAttentionBackend):
    """An attention backend whose builder has a workspace of 40 MiB."""

    @staticmethod
    def create_builder(context):
        builder = NoWaitAttentionBackend.create_builder(context)
        builder.workspace = torch.zeros(40 * MIB, dtype=torch.uint8, device=context.device)
        return builder


@pytest.mark.costly
def test_the_workspace_of_the_attention_backend_is_not_available_for_the_cache(checkpoint):
    left = []
    # The first worker of a process also allocates what later workers share.
    for backend in (NoWaitAttentionBackend, NoWaitAttentionBackend, LargeWorkspaceBackend):
        worker = FakeDeviceWorker(context_of(checkpoint, attention_backend=backend))
        worker.init_device()
        worker.load_model()
        left.append(worker.determine_available_memory())
        worker.shutdown()
        del worker
        gc.collect()
    assert left[1] - left[2] == 40 * MIB


class Waiting(FakeDeviceWorker):
    def execute_model(self, plan):
        with DEVICE.strict():
            super().execute_model(plan)
            torch.zeros(1, device=NAME).item()


class FreesCopySourcesEarly(AcceleratorQueues):
    """A faulty device that frees the sources of copies too early."""

    def fetch(self, sources, targets):
        return super().fetch([source.clone() for source in sources], targets)


class Overwriting(AcceleratorQueues):
    """A faulty device that overwrites the sources of copies."""

    def fetch(self, sources, targets):
        event = super().fetch(sources, targets)
        sources[0].zero_()
        return event


class Unordered(AcceleratorQueues):
    """A faulty device that copies tensors before they are computed."""

    def fetch(self, sources, targets):
        with self._module.stream(self._module.Stream()):
            targets[0].copy_(sources[0], non_blocking=True)
        return self.record()


class IgnoresEventWaits:
    """An event whose `wait` does nothing."""

    def query(self):
        return True

    def synchronize(self):
        pass


class ReadingEarly(AcceleratorQueues):
    """A faulty device that reports copies to the host as complete immediately."""

    def fetch(self, sources, targets):
        super().fetch(sources, targets)
        return IgnoresEventWaits()


class NeverWaiting(ReadingEarly):
    """A faulty device that reports all work as complete immediately."""

    def record(self):
        return IgnoresEventWaits()


def run_steps(worker_cls, context):
    worker = worker_cls(context)
    try:
        harness = WorkerHarness(worker, bring_up(worker)[1])
        harness.join(0, [1, 2, 3])
        tokens = harness.generate(0, 8)
        DEVICE.check()
        return tokens
    finally:
        worker.shutdown()


def run_ahead(context):
    """Launch all steps of a request, then read their results. Return the tokens."""
    worker = FakeDeviceWorker(context)
    try:
        harness = WorkerHarness(worker, bring_up(worker)[1])
        harness.join(0, [1, 2, 3])
        steps = []
        for _ in range(8):
            harness.run(0)
            steps.append(harness.launch())
        tokens = [harness.settle(step)[0] for step in steps]
        DEVICE.check()
        return tokens
    finally:
        worker.shutdown()


def planted(checkpoint, monkeypatch, queues_cls):
    monkeypatch.setattr("dovetail_torch.accelerator.runtime.AcceleratorQueues", queues_cls)
    return run_steps(FakeDeviceWorker, context_of(checkpoint))


@pytest.mark.costly
def test_a_hidden_wait_in_a_step_is_detected(checkpoint):
    with pytest.raises(HiddenWaitError):
        run_steps(Waiting, context_of(checkpoint))


@pytest.mark.parametrize("queues_cls", [FreesCopySourcesEarly, Overwriting, Unordered])
def test_a_write_to_memory_in_flight_is_detected(queues_cls, checkpoint, monkeypatch):
    with pytest.raises(FlightError):
        planted(checkpoint, monkeypatch, queues_cls)


@pytest.mark.costly
def test_reusing_a_staging_slot_too_early_is_detected(checkpoint, monkeypatch):
    assert run_ahead(context_of(checkpoint)) == run_steps(FakeDeviceWorker, context_of(checkpoint))
    monkeypatch.setattr("dovetail_torch.accelerator.runtime.AcceleratorQueues", NeverWaiting)
    with pytest.raises(FlightError):
        run_ahead(context_of(checkpoint))


@pytest.mark.costly
def test_a_result_that_is_read_before_its_copy_is_complete_is_wrong(checkpoint, monkeypatch):
    expected = run_steps(FakeDeviceWorker, context_of(checkpoint))
    DEVICE.reset()
    try:
        mutant = planted(checkpoint, monkeypatch, ReadingEarly)
    except FlightError:
        return  # the memory of the result was reused
    assert mutant != expected


@pytest.mark.costly
def test_shutdown_frees_all_memory(checkpoint):
    gc.collect()
    before = install().memory_allocated()
    worker = FakeDeviceWorker(context_of(checkpoint))
    bring_up(worker)
    assert install().memory_allocated() > before
    worker.shutdown()
    assert install().memory_allocated() == before == install().memory_reserved()
    worker.shutdown()


def start(context):
    gc.collect()  # memory of the last worker
    worker = FakeDeviceWorker(context)
    worker.init_device()
    worker.load_model()
    return worker


@pytest.mark.costly
def test_the_worker_does_not_exceed_its_fraction_of_the_memory(checkpoint):
    available = {}
    for share in (0.5, 0.75):
        worker = start(context_of(checkpoint, gpu_memory_utilization=share))
        available[share] = worker.determine_available_memory()
        worker.shutdown()
    assert available[0.75] - available[0.5] == pytest.approx(
        DEVICE.memory.total_bytes * 0.25, abs=4096
    )
    assert available[0.5] < DEVICE.memory.total_bytes * 0.5


@pytest.mark.costly
def test_the_memory_of_sampling_for_all_requests_is_not_available_for_the_cache(
    checkpoint, monkeypatch
):
    """The profile samples with grammars, penalties and log-probabilities, which needs the most."""

    def left():
        worker = start(context_of(checkpoint, gpu_memory_utilization=0.5, max_num_seqs=3))
        available = worker.determine_available_memory()
        worker.shutdown()
        return available

    usual, draw_for_all, sampled = left(), loaded_model.draw_for_all, []

    def draw_with_more(sampler, logits_SV):
        more = torch.zeros(8 * MIB, dtype=torch.uint8, device=NAME)
        draw_for_all(sampler, logits_SV)
        sampled.append((len(logits_SV), more.numel()))

    monkeypatch.setattr(loaded_model, "draw_for_all", draw_with_more)
    assert usual - left() > 7 * MIB
    assert sampled == [(3, 8 * MIB)]


@pytest.mark.costly
def test_memory_in_use_includes_libraries_but_not_memory_used_before_startup(checkpoint):
    def left(outside_bytes):
        worker = start(context_of(checkpoint, gpu_memory_utilization=0.5))
        DEVICE.memory.outside_bytes += outside_bytes
        available = worker.determine_available_memory()
        worker.shutdown()
        return available

    alone = left(0)
    assert alone - left(5 * MIB) == pytest.approx(5 * MIB, abs=4096)
    DEVICE.reset()
    DEVICE.memory.outside_bytes = 20 * MIB
    assert left(0) == pytest.approx(alone, abs=4096)


def test_too_little_free_memory_is_rejected_with_advice(checkpoint):
    DEVICE.memory.outside_bytes = 32 * MIB
    with pytest.raises(CapacityError, match=r"0\.05 GiB of private.*0\.03 of 0\.06 .* at most 0\."):
        FakeDeviceWorker(context_of(checkpoint, gpu_memory_utilization=0.8)).init_device()
    FakeDeviceWorker(context_of(checkpoint, gpu_memory_utilization=0.4)).init_device()
    sized = context_of(checkpoint, gpu_memory_utilization=0.8, kv_cache_memory_bytes=MIB)
    FakeDeviceWorker(sized).init_device()


def is_low_on_memory(operation):
    """Return a worker whose device is nearly full when `operation` is called."""

    def call(self, *args):
        gc.collect()
        DEVICE.memory.total_bytes = DEVICE.memory.allocated_bytes + 2048
        return getattr(FakeDeviceWorker, operation)(self, *args)

    return type("ShortOfMemory", (FakeDeviceWorker,), {operation: call})


@pytest.mark.costly
@pytest.mark.parametrize(
    ("operation", "purpose"),
    [
        ("load_model", "the model"),
        ("determine_available_memory", "running a step of the maximum size"),
        ("initialize_cache", "the KV cache"),
        ("compile_or_warm_up_model", "a first step"),
    ],
)
def test_out_of_memory_is_reported_at_each_stage_of_the_worker_startup(
    operation, purpose, checkpoint
):
    with pytest.raises(CapacityError, match=f"not enough memory for {purpose}"):
        bring_up(is_low_on_memory(operation)(context_of(checkpoint)))


@pytest.mark.costly
def test_too_small_a_memory_fraction_is_rejected_with_the_required_fraction(checkpoint):
    worker = start(context_of(checkpoint, gpu_memory_utilization=0.001))
    with pytest.raises(CapacityError, match=r"gpu_memory_utilization=0\.001 allows .* GiB more"):
        worker.determine_available_memory()


def test_a_missing_device_is_rejected(checkpoint):
    DEVICE.num_devices = 0
    with pytest.raises(PluginError, match=f"{NAME}:0 was requested, but cannot be used"):
        FakeDeviceWorker(context_of(checkpoint)).init_device()


@pytest.mark.parametrize("device_type", ["cuda", "xpu"])
def test_a_device_type_that_torch_does_not_support_is_rejected(device_type):
    if torch.get_device_module(device_type).is_available():
        pytest.skip("there is one")
    with pytest.raises(PluginError, match=rf"{device_type}:0 was requested.* finds 0 devices\."):
        AcceleratorRuntime(device_type).activate(0, num_threads=None)


PROMPTS = [[5, 6, 7], [9], list(range(3, 40)), [5, 6, 7, 8]]
MANY = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, top_k=7, top_p=0.9, min_p=0.01, seed=4, max_tokens=12),
    SamplingParams(temperature=0, max_tokens=9, logprobs=2, frequency_penalty=0.5),
]


def generate(checkpoint, **options):
    sizes = {"max_model_len": 64, "block_size": 4, "max_num_seqs": 3, "dtype": "float32"}
    settings = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 40, "num_threads": 1}
    llm = LLM(str(checkpoint), **(sizes | settings | PARTS | options))
    try:
        outputs = llm.generate(PROMPTS, MANY, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]
    finally:
        llm.shutdown()


@pytest.mark.costly
@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_generates_the_same_tokens_as_on_the_host(ahead, checkpoint):
    on_host = {"platform": "cpu", "ops": "torch", "linear_method": "torch", "worker_cls": "cpu"}
    expected = generate(checkpoint, **on_host)
    fake = {"platform": FakeDevicePlatform, "worker_cls": FakeDeviceWorker}
    DEVICE.reset(lag=30, seed=2)
    assert generate(checkpoint, **fake, async_scheduling=ahead) == expected
    assert not DEVICE.watch.faults


def test_the_platform_is_never_selected_automatically(checkpoint):
    with pytest.raises(DovetailError):
        make_config(checkpoint, FakeDevicePlatform(), dtype="float64")
    names = [candidate.name for candidate in PluginRegistry().candidates("platform")]
    assert FakeDevicePlatform.info.name not in names and not FakeDevicePlatform.automatic
