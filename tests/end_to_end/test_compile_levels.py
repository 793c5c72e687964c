"""Compiled engines generate the tokens of eager engines. Also: compile cache and errors."""

from __future__ import annotations

import logging
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from dovetail import LLM, SamplingParams
from dovetail.errors import ConfigError, PluginError
from dovetail_devkit.contexts import SMALL_ENGINE, write_fake_config
from dovetail_devkit.fakes.compile_backend import FakeCompileBackend
from dovetail_devkit.fakes.graph_pass import FakeGraphPass
from dovetail_devkit.tiny_model import write_tiny_llama

PROMPTS = [[5, 6, 7, 8, 9, 10], [50], list(range(20, 80)), [3, 3], [9, 1, 4]]
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)
NUM_LAYERS = 3
OPTIONS = {
    "skip_tokenizer_init": True,
    "num_threads": 1,
    "kv_cache_memory_bytes": 4 << 20,
    "block_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "use_tqdm_on_load": False,
    "compile_cache": "off",
    "compile_backend": "eager",
}
LEVELS = ("as_is", "once", "piecewise")
EAGER = {"compile_level": "none", "compile_cache": "auto", "compile_backend": "auto"}
FAKE = "dovetail_devkit.fakes.compile_backend:FakeCompileBackend"
FAKE_PASS = "dovetail_devkit.fakes.graph_pass:FakeGraphPass"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model"), num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Return the outputs of an eager engine, in batches of 1, 3 and 5 requests."""
    with LLM(checkpoint, **(OPTIONS | EAGER)) as llm:
        return serve(llm)


def serve(llm):
    """Return the outputs of all batches. Long prompts are split over several steps."""
    llm.reset_prefix_cache()
    batches = [PROMPTS[:size] for size in (1, 3, len(PROMPTS))]
    return [item.outputs[0] for batch in batches for item in llm.generate(batch, PARAMS)]


def check(outputs, expected, tolerance=1e-4):
    """Compare tokens and log-probabilities. The tiny model has no close logits."""
    for output, eager in zip(outputs, expected, strict=True):
        assert output.token_ids == eager.token_ids
        for left, right in zip(output.logprobs, eager.logprobs, strict=True):
            assert left.keys() == right.keys()
            for token, entry in left.items():
                assert entry.logprob == pytest.approx(right[token].logprob, abs=tolerance)


def report_of(llm):
    (report,) = llm.llm_engine.collective_rpc("get_compile_report")
    return report


def num_traced():
    """Return how many graphs torch has traced in this process."""
    return counters["stats"]["unique_graphs"]


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize("level", LEVELS)
def test_a_compiled_engine_generates_the_tokens_of_an_eager_engine_and_compiles_only_at_startup(
    checkpoint, expected, level
):
    with LLM(checkpoint, **OPTIONS, compile_level=level) as llm:
        before = num_traced()
        check(serve(llm), expected)
        assert num_traced() == before
        assert llm.llm_engine.config.compute.compile_level == level
        report = report_of(llm)
    assert report["level"] == level and report["backend"] == "eager"
    # As is: one graph for a single token, one for others, and maybe one for the first size.
    assert report["num_graphs"] in ((2, 3) if level == "as_is" else (1,))


@pytest.mark.costly
def test_equal_pieces_are_compiled_once_and_listed_sizes_separately(checkpoint, expected):
    FakeCompileBackend.requests.clear()
    options = OPTIONS | {"compile_backend": FAKE, "compile_sizes": [4, 1]}
    with LLM(checkpoint, **options, compile_level="piecewise") as llm:
        check(serve(llm), expected)
        report = report_of(llm)
    # The pieces between attention layers are equal; the first and the last one are not.
    sizes = [num_tokens for num_tokens, _ in FakeCompileBackend.requests]
    assert sizes == [None] * 3 + [1] * 3 + [4] * 3
    assert report["num_compiled"] == 9
    assert report["num_shared"] == 3 * (NUM_LAYERS - 2)


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize("level", LEVELS[1:])
def test_compile_passes_and_a_backend_given_by_qualified_name_are_used(checkpoint, expected, level):
    before = FakeGraphPass.num_applied, FakeCompileBackend.num_compiled
    options = OPTIONS | {"compile_backend": FAKE, "compile_passes": [FAKE_PASS]}
    FakeCompileBackend.requests.clear()
    with LLM(checkpoint, **options, compile_level=level) as llm:
        check(serve(llm), expected)
        assert report_of(llm)["backend"] == FAKE
    assert FakeGraphPass.num_applied == before[0] + 1
    assert len(FakeCompileBackend.requests) == (1 if level == "once" else 3)


IN_ANOTHER_PROCESS = f"""
import sys
from dovetail import LLM
from dovetail_devkit.fakes.compile_backend import FakeCompileBackend
model, folder = sys.argv[1:]
options = {OPTIONS!r} | {{"compile_backend": {FAKE!r}, "compile_cache": folder}}
with LLM(model, **options, compile_level="piecewise") as llm:
    (report,) = llm.llm_engine.collective_rpc("get_compile_report")
    print(report["cache"], FakeCompileBackend.num_found, FakeCompileBackend.num_compiled)
"""


@pytest.mark.costly
def test_the_compile_cache_is_used_by_a_second_start(checkpoint, tmp_path, caplog):
    folder = tmp_path / "cache"
    options = OPTIONS | {"compile_backend": FAKE, "compile_cache": folder}

    def start():
        before = FakeCompileBackend.num_found
        with LLM(checkpoint, **options, compile_level="piecewise") as llm:
            return report_of(llm)["cache"], FakeCompileBackend.num_found - before

    with caplog.at_level(logging.INFO, "dovetail_torch"):
        assert start() == ("miss", 0)
        assert "cache miss" in caplog.text and "stored" in caplog.text
        assert start() == ("hit", 3) and "cache hit" in caplog.text
        (file,) = folder.iterdir()
        damaged = bytearray(file.read_bytes())
        damaged[-1] ^= 1
        file.write_bytes(damaged)
        assert start() == ("damaged", 0) and "the checksum is wrong" in caplog.text


@pytest.mark.slow
def test_another_process_hits_the_compile_cache_and_changed_options_miss_it(checkpoint, tmp_path):
    options = OPTIONS | {"compile_backend": FAKE, "compile_cache": tmp_path / "cache"}

    def start(**changes):
        with LLM(checkpoint, **(options | {"compile_level": "piecewise"} | changes)) as llm:
            return report_of(llm)["cache"]

    assert start() == "miss"
    code = [sys.executable, "-c", IN_ANOTHER_PROCESS, checkpoint, tmp_path / "cache"]
    output = subprocess.run(code, capture_output=True, text=True, check=True).stdout
    assert output.split() == ["hit", "3", "0"]
    for changes in (
        {"compile_passes": [FAKE_PASS]},
        {"compile_sizes": [2]},
        {"compile_level": "once"},
        {"compile_backend": "eager"},
    ):
        assert start(**changes) == "miss", changes
    assert start() == "hit"


@pytest.mark.costly
def test_a_cache_directory_that_cannot_be_written_is_an_error(checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    options = OPTIONS | {"compile_cache": tmp_path / "file"}
    with pytest.raises(ConfigError, match=r"compile_cache='.*' cannot be used.*'off'"):
        LLM(checkpoint, **options, compile_level="once")


@pytest.mark.slow
def test_compilation_preserves_the_state_of_random_generators(checkpoint):
    class Draws(FakeCompileBackend):
        def compile(self, request):
            self.numbers = random.random(), torch.rand(1), np.random.rand()
            return super().compile(request)

    random.seed(1), torch.manual_seed(1), np.random.seed(1)
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()
    with LLM(checkpoint, **(OPTIONS | {"compile_backend": Draws}), compile_level="once"):
        pass
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert np.random.get_state()[1].tolist() == before[2]


# --- errors ---------------------------------------------------------------------------------------


class Raises(FakeCompileBackend):
    def compile(self, request):
        raise ValueError("no such instruction")


class ReturnsNothing(FakeCompileBackend):
    def compile(self, request):
        return None


class TakesNothing(FakeCompileBackend):
    def compile(self, request):
        return lambda: ()


class Doubles(FakeCompileBackend):
    def compile(self, request):
        code = super().compile(request)
        return lambda *inputs: [output * 2 for output in code(*inputs)]


class HasNoKey(FakeCompileBackend):
    def cache_key(self):
        raise OSError("no version")


class RaisesInAPass(FakeGraphPass):
    def apply(self, graph):
        raise KeyError("silu")


class DropsAttention(FakeGraphPass):
    def apply(self, graph):
        node = next(node for node in graph.graph.nodes if "attend" in str(node.target))
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)


class LeavesAnInvalidGraph(FakeGraphPass):
    def apply(self, graph):
        nodes = list(graph.graph.nodes)
        nodes[-2].append(nodes[3])


class ScalesAConstant(FakeGraphPass):
    """Changes the result of the graph."""

    def apply(self, graph):
        for node in graph.graph.nodes:
            if node.op == "output":
                (value,) = node.args[0]
                with graph.graph.inserting_before(node):
                    doubled = graph.graph.call_method("mul", (value, 2.0))
                node.args = ((doubled,),)


FAULTS = [
    ({"compile_backend": Raises}, PluginError, "compile_backend=.*no such instruction"),
    ({"compile_backend": ReturnsNothing}, PluginError, "compile_backend=.*not callable"),
    ({"compile_backend": TakesNothing}, PluginError, "compile_backend=.*compiled code failed"),
    ({"compile_backend": Doubles}, PluginError, "compile_backend=.*computes wrong results"),
    ({"compile_backend": "inductr"}, PluginError, "compile_backend.*Did you mean 'inductor'"),
    ({"compile_passes": [RaisesInAPass]}, PluginError, "compile_passes: .*RaisesInAPass failed"),
    ({"compile_passes": [DropsAttention]}, PluginError, "compile_passes: .*attention calls"),
    ({"compile_passes": [LeavesAnInvalidGraph]}, PluginError, "compile_passes: .*failed"),
    ({"compile_passes": [ScalesAConstant]}, PluginError, "omit compile_passes"),
    ({"compile_passes": ["no.such:Pass"]}, PluginError, "no.such"),
    ({"compile_backend": "./mine.py:Backend"}, PluginError, "trust_local_code"),
]


@pytest.mark.sampled(24)
@pytest.mark.parametrize(("fault", "error", "message"), FAULTS)
def test_a_faulty_backend_or_pass_is_an_error_that_names_the_option(
    checkpoint, fault, error, message
):
    with (
        pytest.raises(error, match=message),
        LLM(checkpoint, **(OPTIONS | fault), compile_level="once"),
    ):
        pass


@pytest.mark.slow
def test_a_compile_backend_that_fails_to_return_its_cache_key_raises_an_error(checkpoint, tmp_path):
    options = OPTIONS | {"compile_backend": HasNoKey, "compile_cache": tmp_path}
    with pytest.raises(PluginError, match=r"compile_backend=.*no version.*compile_cache='off'"):
        LLM(checkpoint, **options, compile_level="once")


def test_a_worker_that_cannot_compile_is_rejected(tmp_path):
    parts = {
        "platform": "dovetail_devkit.fakes.platform:FakePlatform",
        "worker_cls": "dovetail_devkit.fakes.worker:FakeWorker",
        "skip_tokenizer_init": True,
    }
    with pytest.raises(ConfigError, match="compile_level='once' is not supported by the worker"):
        LLM(write_fake_config(tmp_path), **SMALL_ENGINE, **parts, compile_level="once")


@pytest.mark.costly
def test_native_kernels_are_rejected_with_the_options_that_work(tmp_path):
    native = pytest.importorskip("dovetail_cpu.native_library")
    if not native.probe_fast().usable:
        pytest.skip("this machine has no native kernels")
    model = write_tiny_llama(tmp_path, torch_dtype="bfloat16")
    with pytest.raises(ConfigError) as caught:
        LLM(model, **OPTIONS, compile_level="once")
    for part in ("compile_level='once'", "linear_method='onednn'", "ops='torch'"):
        assert part in str(caught.value)
    options = OPTIONS | {"linear_method": "torch", "ops": "torch"}
    with LLM(model, **options, compile_level="once") as llm:
        assert report_of(llm)["num_graphs"] == 1


def test_a_model_that_torch_cannot_trace_is_an_error(checkpoint, monkeypatch):
    from dovetail_torch.layers import RMSNorm

    forward = RMSNorm.forward

    def read_on_the_host(self, x_TD, *arguments):
        if float(x_TD.sum()) == 1.5:
            raise ValueError
        return forward(self, x_TD, *arguments)

    monkeypatch.setattr(RMSNorm, "forward", read_on_the_host)
    with pytest.raises(ConfigError, match="cannot trace the model LlamaForCausalLM"):
        LLM(checkpoint, **OPTIONS, compile_level="piecewise")


# --- Inductor -------------------------------------------------------------------------------------

WITH_INDUCTOR = f"""
import sys
from dovetail import LLM, SamplingParams
from torch._dynamo.utils import counters
model, folder, level = sys.argv[1:]
options = {OPTIONS!r} | {{"compile_backend": "auto", "compile_cache": folder}}
with LLM(model, **options, compile_level=level) as llm:
    (report,) = llm.llm_engine.collective_rpc("get_compile_report")
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    tokens = [list(out.outputs[0].token_ids) for out in llm.generate({PROMPTS!r}, params)]
    inductor = counters["inductor"]
    print(report["backend"], report["cache"], inductor["fxgraph_cache_miss"])
    print(tokens)
"""


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_inductor_gives_the_same_tokens_and_a_second_process_compiles_nothing(
    checkpoint, expected, level, tmp_path
):
    eager = [list(output.token_ids) for output in expected[-len(PROMPTS) :]]
    for expected_cache in ("miss", "hit"):
        code = [sys.executable, "-c", WITH_INDUCTOR, checkpoint, tmp_path / "cache", level]
        done = subprocess.run(code, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        first, tokens = done.stdout.splitlines()[-2:]
        backend, cache, misses = first.split()
        assert (backend, cache) == ("inductor", expected_cache)
        assert (misses == "0") == (cache == "hit")
        assert tokens == str(eager)
