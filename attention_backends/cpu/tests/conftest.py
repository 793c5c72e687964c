"""Use one torch thread: the tensors are small, and two thread pools double the time."""

from __future__ import annotations

import pytest
import torch

import dovetail_cpu_kernels as native


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def restored_team():
    yield
    if native.status().available:
        native.library().dk_set_level(native.library().dk_highest_level())
        native.set_num_threads(1)
