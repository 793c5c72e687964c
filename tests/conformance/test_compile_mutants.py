"""The suites of compile backends and graph passes detect faulty plugins: each has one fault."""

import itertools
import operator

import pytest
import torch

from dovetail.interfaces import GraphPass
from dovetail_devkit.fakes.compile_backend import FakeCompileBackend
from dovetail_devkit.fakes.graph_pass import FakeGraphPass
from dovetail_devkit.suites.compile_backend import check_compile_backend
from dovetail_devkit.suites.graph_pass import check_graph_pass

HOST = torch.device("cpu")
NUMBERS = itertools.count()


def wrapped(change):
    """Return a backend. change: function of code, inputs and request that returns the outputs."""

    class Changed(FakeCompileBackend):
        def compile(self, request):
            code = super().compile(request)
            return lambda *inputs: change(code, inputs, request)

    return Changed


def with_constant_weights():
    class Changed(FakeCompileBackend):
        def compile(self, request):
            code, weights = super().compile(request), {}

            def run(*inputs):
                for place, value in enumerate(inputs):
                    if isinstance(value, torch.nn.Parameter):
                        weights.setdefault(place, value.clone())
                return code(*(weights.get(place, value) for place, value in enumerate(inputs)))

            return run

    return Changed


def for_traced_sizes(code, inputs, request):
    """Compute at most as many tokens as were traced."""
    return [output[:7] for output in code(*inputs)]


def with_changed_inputs(code, inputs, request):
    outputs = code(*inputs)
    for value in inputs:
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            value.mul_(2)
    return outputs


class ReturnsNoCallable(FakeCompileBackend):
    def compile(self, request):
        return request.graph.code


class FailsWithAFolder(FakeCompileBackend):
    """Uses files of an earlier start, which belong to another graph."""

    def compile(self, request):
        code = super().compile(request)
        if self._folder is None:
            return code
        file = self._folder / "weights"
        if file.exists():
            return lambda *inputs: [output + 1 for output in code(*inputs)]
        file.write_text("")
        return code


class HasAKeyPerFolder(FakeCompileBackend):
    def cache_key(self):
        return f"fake 1 {self._folder}"


class HasNoKey(FakeCompileBackend):
    def cache_key(self):
        return ""


BACKENDS = [
    (wrapped(lambda code, inputs, request: code(*inputs)[0]), "list or tuple"),
    (wrapped(lambda code, inputs, request: code(*inputs)[:1]), "list or tuple of 2"),
    (wrapped(lambda code, inputs, request: [x * 1.01 for x in code(*inputs)]), "must equal"),
    (wrapped(for_traced_sizes), "40 tokens"),
    (wrapped(with_changed_inputs), "must not change its inputs"),
    (with_constant_weights(), "read its inputs in each call"),
    (ReturnsNoCallable, "must return a callable"),
    (FailsWithAFolder, "must equal"),
    (HasAKeyPerFolder, "the same string"),
    (HasNoKey, "the same string"),
]


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("backend", "message"), BACKENDS)
def test_a_faulty_compile_backend_is_detected(backend, message):
    with pytest.raises(AssertionError, match=message):
        check_compile_backend(backend, HOST)


def passes(change):
    """Return a pass. change: function of the graph and its nodes."""

    class Changed(FakeGraphPass):
        def apply(self, graph):
            change(graph.graph, list(graph.graph.nodes))

    return Changed


def calls_of_attention(nodes):
    return [node for node in nodes if "attend" in str(node.target)]


def without_one_call(graph, nodes):
    node = calls_of_attention(nodes)[0]
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def with_exchanged_layers(graph, nodes):
    for index, node in enumerate(reversed(calls_of_attention(nodes))):
        node.args = (*node.args[:4], index)


def with_another_result(graph, nodes):
    for node in nodes:
        if node.target in (operator.mul, torch.mul):
            node.target = operator.add


def without_an_output(graph, nodes):
    nodes[-1].args = (nodes[-1].args[0][:1],)


def with_one_more_input(graph, nodes):
    with graph.inserting_before(nodes[0]):
        graph.placeholder("more")


def with_a_use_before_its_definition(graph, nodes):
    next(node for node in nodes if node.op != "placeholder").prepend(nodes[-2])


class HasANewKey(FakeGraphPass):
    def cache_key(self):
        return str(next(NUMBERS))


PASSES = [
    (passes(without_one_call), "attention calls"),
    (passes(with_exchanged_layers), "attention calls"),
    (passes(with_another_result), "must be equal"),
    (passes(without_an_output), "number of outputs"),
    (passes(with_one_more_input), "placeholders"),
    (passes(with_a_use_before_its_definition), "before it has been defined"),
    (HasANewKey, "the same string"),
]


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("graph_pass", "message"), PASSES)
def test_a_faulty_graph_pass_is_detected(graph_pass: type[GraphPass], message):
    with pytest.raises(AssertionError, match=message):
        check_graph_pass(graph_pass, HOST)


def test_the_fakes_pass_their_suites():
    check_compile_backend(FakeCompileBackend, HOST)
    check_graph_pass(FakeGraphPass, HOST)
