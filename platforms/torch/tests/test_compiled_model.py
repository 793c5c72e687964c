"""A compiled model: what torch traces, and compilations after startup."""

import logging

import pytest
import torch
from torch import nn

from dovetail.errors import PluginError
from dovetail.interfaces import CompileContext
from dovetail_torch.attention_table import AttentionTable
from dovetail_torch.compilation.backends import EagerBackend
from dovetail_torch.compilation.compiled_model import CompiledModel
from dovetail_torch.compilation.compiler import CompilePlan, GraphCompiler


class AddsKeys:
    """An attention layer whose result is the sum of query and key."""

    def forward(self, q_THD, k_TKD, v_TKD, cache, metadata, out_THD):
        out_THD.copy_(q_THD + k_TKD)


class SmallModel(nn.Module):
    """One attention layer between two matrix products. factor: a number that torch guards."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        values_VD = torch.randn(32, 8, generator=generator)
        self.embedding_VD = nn.Parameter(values_VD, requires_grad=False)
        self.factor = 2.0

    def forward(self, input_ids_T, positions_T, attention):
        x_T1D = self.embedding_VD[input_ids_T][:, None]
        y_T1D = attention.attend(0, x_T1D, x_T1D * self.factor, x_T1D)
        return y_T1D[:, 0] * self.factor + positions_T[:, None]


@pytest.fixture
def table():
    table = AttentionTable([AddsKeys()], [torch.zeros(1)], [0])
    table.metadata = [None]
    return table


def compiled(level, table):
    backend = EagerBackend(CompileContext(device=torch.device("cpu"), dtype=torch.float32))
    plan = CompilePlan(level=level, backend_name="eager")
    compiler = GraphCompiler(plan, backend, table, None, None)
    model = SmallModel()
    return CompiledModel(model, table, compiler), model, compiler


def inputs(num_tokens):
    return torch.arange(num_tokens) % 32, torch.arange(num_tokens)


@pytest.mark.costly
@torch.inference_mode()
@pytest.mark.parametrize("level", ["as_is", "once", "piecewise"])
def test_no_number_of_tokens_triggers_a_recompilation_after_startup(level, table):
    subject, model, compiler = compiled(level, table)
    for num_tokens in (13, 6, 1):
        subject.forward(*inputs(num_tokens), table)
    compiler.finish()
    before = compiler.report.num_graphs
    for num_tokens in (1, 2, 7, 13, 100):
        expected_TD = model.forward(*inputs(num_tokens), table)
        assert torch.equal(subject.forward(*inputs(num_tokens), table), expected_TD)
    assert compiler.report.num_graphs == before
    assert compiler.report.num_recompiled == 0


@torch.inference_mode()
def test_a_compilation_in_a_step_is_counted_and_reported(table, caplog):
    subject, model, compiler = compiled("as_is", table)
    for num_tokens in (13, 6, 1):
        subject.forward(*inputs(num_tokens), table)
    compiler.finish()
    model.factor = 3.0
    with caplog.at_level(logging.WARNING, "dovetail_torch"):
        hidden_TD = subject.forward(*inputs(5), table)
    assert torch.equal(hidden_TD, model.forward(*inputs(5), table))
    assert compiler.report.num_recompiled == 1
    assert "compile_level='as_is'" in caplog.text and "recompiles during a step" in caplog.text


@torch.inference_mode()
@pytest.mark.parametrize("level", ["once", "piecewise"])
def test_a_second_trace_is_an_error_at_levels_with_one_graph(level, table):
    subject, _, compiler = compiled(level, table)
    subject.forward(*inputs(13), table)
    compiler.finish()
    graphs = []

    def keep(graph, example_inputs):
        graphs.append((graph, example_inputs))
        return graph.forward

    torch.compile(lambda x: x + 1, backend=keep)(torch.ones(3))
    with pytest.raises(PluginError, match=f"compile_level='{level}'.*recompiles during a step"):
        compiler(*graphs[0])
    assert compiler.report.num_graphs == 1
