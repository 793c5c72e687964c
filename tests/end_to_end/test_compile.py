"""A model compiled as one graph. Its attention operator looks up the engine in a table."""

from __future__ import annotations

import gc

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail_cpu.worker import CPUWorker

PROMPTS = [[5, 6, 7, 8, 9, 10], [50], list(range(30, 70))]
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=3)


class CompiledWorker(CPUWorker):
    """Compiles the whole forward pass after the cache is allocated. A graph break is an error."""

    backend = "aot_eager"
    num_forwards = 0

    def compile_or_warm_up_model(self):
        compiled = torch.compile(self._model.forward, fullgraph=True, backend=self.backend)

        def forward(*arguments):
            type(self).num_forwards += 1
            return compiled(*arguments)

        self._model.forward = forward


class InductorWorker(CompiledWorker):
    backend = "inductor"
    num_forwards = 0


@pytest.fixture(autouse=True)
def fresh_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()


def generate(llm):
    outputs = llm.generate(PROMPTS, PARAMS)
    return [out.outputs[0] for out in outputs]


def check(eager, compiled, tolerance):
    for item, two in zip(eager, compiled, strict=True):
        assert item.token_ids == two.token_ids
        for left, right in zip(item.logprobs, two.logprobs, strict=True):
            assert left.keys() == right.keys()
            for token, entry in left.items():
                assert entry.logprob == pytest.approx(right[token].logprob, abs=tolerance)


def test_a_model_compiled_as_one_graph_gives_the_same_tokens_as_eager_mode(model_dir, options, llm):
    CompiledWorker.num_forwards = 0
    with LLM(model_dir, worker_cls=CompiledWorker, **options) as compiled:
        check(generate(llm), generate(compiled), 1e-5)
        assert CompiledWorker.num_forwards == 8
        check(generate(llm), generate(compiled), 1e-5)  # with prefix hits


def test_compiled_engines_of_one_process_use_their_own_caches(model_dir, qwen_dir, options, llm):
    """Two engines of one model share the compiled graph. Each must write to its own cache."""
    options = options | {"enable_prefix_caching": False}
    eager = generate(llm)
    with (
        LLM(model_dir, worker_cls=CompiledWorker, **options) as first,
        LLM(model_dir, worker_cls=CompiledWorker, block_size=8, **without(options)) as second,
        LLM(qwen_dir, worker_cls=CompiledWorker, **options) as other,
        LLM(qwen_dir, **options) as other_eager,
    ):
        slots = {slot_of(each) for each in (first, second, other)}
        assert len(slots) == 3
        check(eager, generate(first), 1e-5)
        check(eager, generate(second), 1e-5)
        check(generate(other_eager), generate(other), 1e-5)
        interleave(first, second, eager)


def slot_of(llm):
    """Return the slot number of an engine's attention table."""
    return llm.llm_engine.client.core.executor._worker._runner._attention.table.slot


def without(options):
    return {name: value for name, value in options.items() if name != "block_size"}


def interleave(first, second, eager):
    engines = [first.llm_engine, second.llm_engine]
    actual = [{}, {}]
    for engine in engines:
        for number, prompt in enumerate(PROMPTS):
            engine.add_request(str(number), prompt, PARAMS)
    while any(engine.has_unfinished_requests() for engine in engines):
        for engine, results in zip(engines, actual, strict=True):
            results |= {out.request_id: out.outputs[0] for out in engine.step() if out.finished}
    for results in actual:
        check(eager, [results[str(number)] for number in range(len(PROMPTS))], 1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_inductor_gives_the_same_tokens_as_eager_mode(model_dir, options, llm):
    InductorWorker.num_forwards = 0
    with LLM(model_dir, worker_cls=InductorWorker, **options) as compiled:
        check(generate(llm), generate(compiled), 1e-4)
        assert InductorWorker.num_forwards == 8
