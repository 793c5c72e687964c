import pytest
import torch

from dovetail.errors import MessageError
from dovetail.transport.ndarray import ELEMENT_BYTES
from dovetail.transport.values import pack_value, unpack_value
from dovetail_torch.tensor_wire import pack_tensor, unpack_tensor


def over(tensor):
    return unpack_tensor(unpack_value(pack_value(pack_tensor(tensor))))


@pytest.mark.parametrize("name", ELEMENT_BYTES)
def test_tensors_of_every_dtype_arrive_unchanged(name):
    dtype = getattr(torch, {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(name, name))
    generator = torch.Generator().manual_seed(3)
    tensor = torch.randint(0, 2, (3, 4), generator=generator).to(dtype)
    actual = over(tensor)
    assert actual.dtype == dtype and actual.shape == tensor.shape
    assert torch.equal(actual.float(), tensor.float())
    assert pack_tensor(tensor).dtype == name


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12)[::3],
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.ones(2, requires_grad=True),
        torch.ones(1).expand(4),
    ],
    ids=["transposed", "strided", "scalar", "empty", "grad", "expanded"],
)
def test_tensors_of_any_layout_arrive_unchanged(tensor):
    actual = over(tensor)
    assert torch.equal(actual, tensor.detach()) and actual.shape == tensor.shape
    actual.add_(1)  # the tensor is a copy


def test_unsupported_dtypes_are_rejected():
    with pytest.raises(MessageError, match="complex64"):
        pack_tensor(torch.ones(1, dtype=torch.complex64))
