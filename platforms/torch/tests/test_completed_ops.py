"""A provider overrides some operations. Torch computes the others."""

from types import SimpleNamespace

import pytest
import torch

from dovetail.errors import ContractError
from dovetail.interfaces import Ops
from dovetail.interfaces.ops import ROUNDED, operation, overridden_operations
from dovetail.plugins.contracts.checks import check_contract
from dovetail.plugins.contracts.declared import promises_equal_bits
from dovetail_torch.layers import CompletedOps, TorchOps

X_T2D = torch.tensor([[0.5, -1.0, 2.0, 3.0]])


class NegativeSilu(Ops):
    """A provider that overrides one operation, with a different result."""

    def silu_and_mul(self, x_T2D):
        return -TorchOps().silu_and_mul(x_T2D)


class Structural:
    """A provider that does not inherit from the contract."""

    CONTRACT = "ops"
    device_types = frozenset()
    dtypes = frozenset()
    batch_invariant = frozenset()
    batch_dependent = frozenset()

    def silu_and_mul(self, x_T2D):
        return x_T2D


def test_the_provider_computes_overridden_operations_and_torch_the_others():
    ops, torch_ops = CompletedOps(NegativeSilu()), TorchOps()
    assert ops.overridden == {"silu_and_mul"}
    assert torch.equal(ops.silu_and_mul(X_T2D), -torch_ops.silu_and_mul(X_T2D))
    weight = torch.ones(4)
    assert torch.equal(ops.rms_norm(X_T2D, weight, 1e-6), torch_ops.rms_norm(X_T2D, weight, 1e-6))


def test_the_torch_ops_have_every_operation_except_draw_tokens():
    names = {name for name, method in vars(Ops).items() if hasattr(method, "is_optional")}
    assert names - overridden_operations(TorchOps) == {"draw_tokens"}


def test_a_provider_with_one_operation_meets_the_contract():
    check_contract("ops", NegativeSilu)
    check_contract("ops", Structural)
    invalid = {"silu_and_mul": lambda self: None}
    with pytest.raises(ContractError, match="silu_and_mul"):
        check_contract("ops", type("Wrong", (Structural,), invalid))


def test_providers_remain_valid_if_the_contract_gets_a_new_operation(monkeypatch):
    @operation
    def gelu(self, x_TD):
        raise NotImplementedError

    monkeypatch.setattr(Ops, "gelu", gelu, raising=False)
    monkeypatch.setattr(TorchOps, "gelu", lambda self, x_TD: x_TD + 1, raising=False)
    for provider in (NegativeSilu, Structural):
        check_contract("ops", provider)
        ops = CompletedOps(provider())
        assert "gelu" not in ops.overridden
        assert torch.equal(ops.gelu(X_T2D), X_T2D + 1)


def test_batch_invariance_is_declared_only_for_the_providers_operations():
    def provider(names):
        methods = {name: getattr(TorchOps, name) for name in names}
        return type("Provider", (Ops,), {"batch_invariant": frozenset({"float32"}), **methods})

    assert promises_equal_bits("ops", provider(ROUNDED), "float32")
    assert not promises_equal_bits("ops", provider(ROUNDED - {"rms_norm"}), "float32")
    assert not promises_equal_bits("ops", SimpleNamespace, "float32")
