"""The suites of ops and linear methods detect faulty layer norms and fused activations."""

import pytest
from conformance.subjects import check

from dovetail_devkit.fakes.linear_method import FakeLinearMethod
from dovetail_devkit.fakes.ops import FakeOps


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
