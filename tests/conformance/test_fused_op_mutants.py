"""The suites of ops and linear methods detect faulty layer norms, activations, scales and caps."""

import pytest
import torch
from conformance.subjects import check

from dovetail_devkit.case import run_all
from dovetail_devkit.fakes.linear_method import FakeLinearMethod
from dovetail_devkit.fakes.ops import FakeOps
from dovetail_devkit.ops.elementwise import elementwise_cases


class VarianceOfSquares(FakeOps):
    """A layer norm that subtracts the squared mean from the mean square, in the input's dtype."""

    def layer_norm(self, x_TD, weight_D, bias_D, eps):
        mean = x_TD.mean(-1, keepdim=True)
        variance = (x_TD.square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)
        y_TD = (x_TD - mean) * (variance + eps).rsqrt()
        y_TD = y_TD if weight_D is None else y_TD * weight_D
        return y_TD if bias_D is None else y_TD + bias_D


class NormsWithoutTheResidual(FakeOps):
    """A layer norm that omits the residual, and returns the correct sum."""

    def add_layer_norm(self, x_TD, residual_TD, weight_D, bias_D, eps):
        _, sum_TD = super().add_layer_norm(x_TD, residual_TD, weight_D, bias_D, eps)
        return self.layer_norm(x_TD, weight_D, bias_D, eps), sum_TD


class ApproximatesGelu(FakeLinearMethod):
    """A linear method that computes the tanh form of GELU in place of the exact one."""

    def apply_activation(self, layer, x_TI, activation):
        name = "gelu_tanh" if activation == "gelu" else activation
        return super().apply_activation(layer, x_TI, name)


class ActivatesBeforeTheBias(FakeLinearMethod):
    """A linear method that adds the bias after the activation."""

    def apply_activation(self, layer, x_TI, activation):
        bias_O, layer.bias = layer.bias, None
        y_TO = super().apply_activation(layer, x_TI, activation)
        layer.bias = bias_O
        return y_TO if bias_O is None else y_TO + bias_O


@pytest.mark.costly
@pytest.mark.parametrize(
    ("kind", "mutant"),
    [
        ("ops", VarianceOfSquares),
        ("ops", NormsWithoutTheResidual),
        ("linear_method", ApproximatesGelu),
        ("linear_method", ActivatesBeforeTheBias),
    ],
)
def test_a_faulty_fused_operation_is_detected(kind, mutant, tmp_path):
    message = "layer_norm" if kind == "ops" else "gelu"
    with pytest.raises(AssertionError, match=message):
        check(kind, mutant, tmp_path)


class ExactGelu(FakeOps):
    """The exact GELU in place of its tanh form."""

    def gelu_tanh_and_mul(self, x_TD, gate_TD):
        return (x_TD.double() * torch.nn.functional.gelu(gate_TD.double())).to(x_TD)


class GatesTheOther(FakeOps):
    """The activation of x, multiplied by the gate."""

    def gelu_tanh_and_mul(self, x_TD, gate_TD):
        return super().gelu_tanh_and_mul(gate_TD, x_TD)


class ChangesTheGate(FakeOps):
    """Stores the result in the gate."""

    def gelu_tanh_and_mul(self, x_TD, gate_TD):
        return gate_TD.copy_(super().gelu_tanh_and_mul(x_TD, gate_TD))


class RoundsTheFactor(FakeOps):
    """Rounds the factor to the dtype of x."""

    def scale(self, x_TD, factor):
        return super().scale(x_TD, float(torch.tensor(factor).to(x_TD)))


class Clamps(FakeOps):
    """Clamps the logits to the cap."""

    def soft_cap(self, logits_RV, cap):
        return logits_RV.clamp(-cap, cap)


class ForgetsTheCap(FakeOps):
    """Returns values between -1 and 1."""

    def soft_cap(self, logits_RV, cap):
        return super().soft_cap(logits_RV, cap) / cap


class CapsInPlaceOfContiguousRows(FakeOps):
    """Takes rows for contiguous."""

    def soft_cap(self, logits_RV, cap):
        rows = torch.as_strided(logits_RV, logits_RV.shape, (logits_RV.shape[1], 1))
        return super().soft_cap(rows, cap)


ELEMENTWISE = {
    ExactGelu: "gelu_tanh_and_mul",
    GatesTheOther: "gelu_tanh_and_mul",
    ChangesTheGate: "must not change its gate",
    RoundsTheFactor: "scale .* in float16",
    Clamps: "soft_cap",
    ForgetsTheCap: "soft_cap",
    CapsInPlaceOfContiguousRows: "soft_cap",
}


@pytest.mark.parametrize("mutant", ELEMENTWISE)
def test_a_faulty_elementwise_operation_is_detected(mutant):
    cases = elementwise_cases(mutant, torch.device("cpu"), dtypes=("float32", "float16"))
    with pytest.raises(AssertionError, match=ELEMENTWISE[mutant]):
        run_all(cases)
