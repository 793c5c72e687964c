"""The fake device computes as the host does, and the host cannot access its memory."""

import gc

import pytest
import torch
from torch import nn

from dovetail_torch.fake_device import DEVICE, NAME, FakeDeviceTensor, install

MIB = 1 << 20


@pytest.fixture(autouse=True, params=[False, True], ids=["plain", "inference"])
def device(request):
    install()
    DEVICE.reset()
    with torch.inference_mode(request.param):
        yield torch.device(NAME, 0)
    DEVICE.check()
    DEVICE.reset()


def test_the_fake_device_has_a_separate_device_type(device):
    x = torch.zeros(3, device=device)
    assert isinstance(x, FakeDeviceTensor) and x.device == device and x.device.type == NAME
    assert torch.get_device_module(NAME) is install()
    assert "shape=[3]" in repr(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda **kw: torch.zeros(2, 3, **kw),
        lambda **kw: torch.ones(4, dtype=torch.bfloat16, **kw),
        lambda **kw: torch.full((2,), 7, **kw),
        lambda **kw: torch.arange(5, **kw),
        lambda **kw: torch.arange(2, 9, 3, dtype=torch.int32, **kw),
        lambda **kw: torch.linspace(0, 1, 5, **kw),
        lambda **kw: torch.eye(3, **kw),
        lambda **kw: torch.tensor([[1, 2], [3, 4]], **kw),
        lambda **kw: torch.tensor(2.5, **kw),
        lambda **kw: torch.zeros_like(torch.ones(3), **kw),
        lambda **kw: torch.ones(2).new_zeros((3, 2), **kw),
        lambda **kw: torch.empty(2, 0, **kw),
    ],
)
def test_new_tensors_on_the_device_equal_new_tensors_on_the_host(make, device):
    created, due = make(device=device), make()
    assert isinstance(created, FakeDeviceTensor)
    assert (created.shape, created.dtype, created.stride()) == (due.shape, due.dtype, due.stride())
    assert torch.equal(created.cpu(), due)


def program(x, indices, mask):
    """Run writes to views and masks, `out=`, products, reductions and sorting.

    Return all results.
    """
    y = x.clone()
    y[1] = 5.0
    y[:, 1:3] += x[:, :2]
    y.view(-1)[::2].mul_(2)
    y.index_copy_(0, indices, x.index_select(0, indices) * 3)
    y.index_put_((indices, indices), torch.ones_like(y[0, :2]))
    y.masked_fill_(mask, -1.0)
    y[y > 8] = 8.0
    z = torch.empty_like(y)
    torch.mul(y, 2, out=z)
    z.unsqueeze(0).transpose(1, 2).contiguous().flatten()
    logits = nn.functional.linear(z, x) @ x
    attended = nn.functional.scaled_dot_product_attention(
        z[None, None], y[None, None], x[None, None], is_causal=True
    )
    best, indexes = logits.topk(2)
    order = torch.where(mask, logits, 0.0).sort(dim=-1, stable=True).indices
    return y, z, attended, best, indexes, order.gather(1, indexes), logits.softmax(-1).cumsum(-1)


def test_torch_operations_are_bitwise_equal_on_the_device_and_on_the_host(device):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 4, generator=generator)
    arguments = x, torch.tensor([2, 0]), torch.rand(4, 4, generator=generator) > 0.7
    there = program(*(argument.to(device) for argument in arguments))
    for created, due in zip(there, program(*arguments), strict=True):
        assert isinstance(created, FakeDeviceTensor)
        if torch.is_inference_mode_enabled():
            assert torch.equal(created.cpu(), due)
        # In other modes, torch decomposes attention before it calls the device.
        torch.testing.assert_close(created.cpu(), due)


def test_views_share_memory_and_copies_do_not(device):
    x = torch.zeros(4, device=device)
    view, copy = x[1:], x.clone()
    view.fill_(1)
    assert x.tolist() == [0, 1, 1, 1] and copy.tolist() == [0, 0, 0, 0]
    half = torch.zeros(8, dtype=torch.uint8, device=device)[4:].view(torch.int32)
    half.fill_(1)
    assert half.tolist() == [1]


@pytest.mark.parametrize("mode", [False, True])
def test_views_are_inference_tensors_if_their_base_is_one(mode, device):
    with torch.inference_mode(mode):
        base, due = torch.zeros(4, device=device), torch.zeros(4)
    with torch.inference_mode(not mode):
        assert base[1:].is_inference() == due[1:].is_inference() == mode
        assert base.add(1).is_inference() == due.add(1).is_inference()
    with torch.inference_mode():
        base[1:].view(3).add_(1)
    assert base.tolist() == [0, 1, 1, 1]


def test_a_module_on_the_device_is_filled_in_place(device):
    layer = nn.Linear(3, 2, device=device)
    weight = torch.arange(6.0).view(2, 3)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.zero_()
    assert isinstance(layer.weight, nn.Parameter) and layer.weight.device == device
    assert set(layer.state_dict()) == {"weight", "bias"}
    with torch.no_grad():
        created = layer(torch.ones(1, 3, device=device))
    assert created.tolist() == [[3.0, 12.0]]


def test_equal_seeds_give_equal_random_numbers_on_the_fake_device(device):
    torch.manual_seed(5)
    first = torch.empty(4, device=device).uniform_().tolist()
    torch.manual_seed(5)
    assert torch.empty(4, device=device).uniform_().tolist() == first
    with pytest.raises(RuntimeError, match="generator"):
        torch.empty(4, device=device).uniform_(generator=torch.Generator())


def test_the_host_cannot_access_device_memory_and_operations_cannot_mix_devices(device):
    x = torch.zeros(3, device=device)
    with pytest.raises(TypeError):
        x.numpy()
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat([x, torch.ones(1)])
    assert (x + torch.tensor(2.0)).tolist() == [2, 2, 2]  # a single number may be on the host


def test_an_output_tensor_of_a_different_shape_is_rejected(device):
    with pytest.raises(RuntimeError, match="correct shape"):
        torch.add(torch.ones(3, device=device), 1, out=torch.empty(0, device=device))


@pytest.mark.costly
def test_device_memory_is_counted_and_freed(device):
    module = install()
    gc.collect()
    before = module.memory_allocated()
    x = torch.zeros(MIB, dtype=torch.uint8, device=device)
    view = x[5:].view(-1)
    assert module.memory_allocated() - before == MIB
    module.reset_peak_memory_stats()
    torch.zeros(2 * MIB, dtype=torch.uint8, device=device)
    assert module.max_memory_allocated() - before == 3 * MIB
    assert module.memory_allocated() - before == MIB
    free, total = module.mem_get_info()
    assert total - free == module.memory_reserved() >= 3 * MIB + before
    module.empty_cache()
    assert module.mem_get_info()[0] == free + 2 * MIB
    del x
    assert module.memory_allocated() - before == MIB
    del view
    assert module.memory_allocated() == before


def test_allocating_more_than_the_total_device_memory_fails(device):
    DEVICE.memory.total_bytes = DEVICE.memory.allocated_bytes + 4 * MIB
    x = torch.zeros(MIB, device=device)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.zeros(1, device=device)
    with pytest.raises(torch.OutOfMemoryError):
        x.add(1)
    del x
    torch.zeros(MIB // 2, device=device)
    DEVICE.memory.outside_bytes = 3 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(MIB // 2, device=device)


def test_the_module_has_the_api_of_a_device_module(device):
    module = install()
    assert module.is_available() and module.device_count() == 1 and module.current_device() == 0
    module.set_device(device)
    assert module.get_device_properties(0).total_memory == module.mem_get_info()[1]
    with pytest.raises(RuntimeError, match="does not exist"):
        module.set_device(1)
    DEVICE.num_devices = 0
    assert not module.is_available()
