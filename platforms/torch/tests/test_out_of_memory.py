"""Every out-of-memory error becomes a CapacityError. Other errors pass unchanged."""

import errno

import pytest
import torch

from dovetail.errors import CapacityError, PluginLoadError
from dovetail_torch.out_of_memory import explain_oom


@explain_oom("the test", "run another")
def run(action):
    return action()


def fail(error, cause=None):
    raise error from cause


SHORTAGES = {
    "Python": lambda: fail(MemoryError()),
    "the system": lambda: fail(OSError(errno.ENOMEM, "Cannot allocate memory")),
    "torch": lambda: torch.empty(1 << 60, dtype=torch.uint8),
    "an accelerator": lambda: fail(torch.OutOfMemoryError("no room")),
    "a plugin": lambda: fail(PluginLoadError("its constructor failed"), MemoryError()),
}
OTHERS = {
    "a missing file": FileNotFoundError(errno.ENOENT, "none"),
    "a shape error": RuntimeError("shapes differ"),
    "a plugin error": PluginLoadError("its constructor failed"),
    "a more specific CapacityError": CapacityError("two blocks do not fit"),
}


@pytest.mark.parametrize("caller", SHORTAGES)
def test_an_out_of_memory_error_is_reported_with_the_remedy(caller):
    with pytest.raises(CapacityError, match=r"memory for the test.*Free memory, or run another\.$"):
        run(SHORTAGES[caller])


@pytest.mark.parametrize("what", OTHERS)
def test_other_errors_are_not_changed(what):
    with pytest.raises(type(OTHERS[what])) as passed:
        run(lambda: fail(OTHERS[what]))
    assert passed.value is OTHERS[what]


def test_explain_oom_does_not_change_the_result_of_a_block_without_an_error():
    assert run(lambda: 7) == 7
