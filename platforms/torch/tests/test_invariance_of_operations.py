"""Operations of a model whose provider does not guarantee bitwise equal results in every batch."""

from types import SimpleNamespace

import pytest
import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.model import StateTensor
from dovetail.interfaces.ops import RECURRENCE_OPERATIONS, Ops, overridden_operations
from dovetail_devkit.fakes.ops import FakeOps
from dovetail_torch.batch_invariance import BatchInvariance
from dovetail_torch.layers import GeluTanhAndMul, SiluAndMul, StateLayer, TorchOps


class EqualOps(FakeOps):
    batch_invariant = frozenset({"float32"})


class DependentOps(EqualOps):
    batch_dependent = frozenset({"linear_attention", "fused_experts"})


def test_a_provider_may_exclude_operations_from_its_guarantee():
    ranks, required = SimpleNamespace(size=1), BatchInvariance("float32", required=True)
    required.add_states(EqualOps, ranks)
    required.add_attention(None, [SimpleNamespace(value_size=8)], DependentOps)
    message = "states and the ops DependentOps, which do not guarantee it for linear_attention"
    with pytest.raises(ConfigError, match=message):
        required.add_states(DependentOps, ranks)


@pytest.mark.parametrize("omitted", ["gated_recurrence", "gelu_tanh_and_mul"])
def test_a_recurrent_layer_may_name_other_operations_that_the_provider_must_guarantee(omitted):
    class NoRecurrence(Ops):
        batch_invariant = EqualOps.batch_invariant

    for name in overridden_operations(EqualOps) - {omitted}:
        setattr(NoRecurrence, name, getattr(EqualOps, name))
    required, ranks = BatchInvariance("float32", required=True), SimpleNamespace(size=1)
    state = StateTensor((3,), torch.float32, torch.device("cpu"))
    required.add_states(NoRecurrence, ranks, [StateLayer(0, [state])])
    layer = StateLayer(0, [state], RECURRENCE_OPERATIONS)
    required.add_states(EqualOps, ranks, [layer])
    message = f"the ops NoRecurrence, which do not guarantee it for {omitted}"
    with pytest.raises(ConfigError, match=message):
        required.add_states(NoRecurrence, ranks, [layer])


def test_the_provider_must_guarantee_gated_gelu_only_for_models_that_use_it():
    class NoGelu(Ops):
        batch_invariant = EqualOps.batch_invariant

    for name in overridden_operations(EqualOps) - {"gelu_tanh_and_mul"}:
        setattr(NoGelu, name, getattr(EqualOps, name))
    required = BatchInvariance("float32", required=True)
    context = SimpleNamespace(ops=None)
    silu, gelu = SiluAndMul(context), GeluTanhAndMul(context)
    required.add_activations(NoGelu, [silu])
    required.add_activations(EqualOps, [silu, gelu])
    message = "models with gated GELU and the ops NoGelu, .* for gelu_tanh_and_mul"
    with pytest.raises(ConfigError, match=message):
        required.add_activations(NoGelu, [silu, gelu])


def test_ops_without_any_guarantee_are_reported_once(caplog):
    reported = BatchInvariance("float32", required=False)
    reported.add("ops", TorchOps)
    reported.add_activations(TorchOps, [GeluTanhAndMul(SimpleNamespace(ops=None))])
    reported.report()
    assert "dtype float32: ops TorchOps. Set" in caplog.text


def test_a_warning_names_the_part_of_the_model(caplog):
    reported = BatchInvariance("float32", required=False)
    reported.add_states(DependentOps, SimpleNamespace(size=1))
    reported.report()
    assert "states of the model" in caplog.text
