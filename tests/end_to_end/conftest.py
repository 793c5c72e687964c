from __future__ import annotations

import pytest
import torch

from dovetail import LLM
from end_to_end.checkpoints import OPTIONS, make_checkpoint


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Use one torch thread, because two threads would not speed up such small models."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory, one_thread):
    """Return the directory of a small random Llama model with a tokenizer and a chat template."""
    return make_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def qwen_dir(tmp_path_factory, one_thread):
    """Return the directory of a small random Qwen2 model with different sizes."""
    return make_checkpoint(
        tmp_path_factory.mktemp("qwen"), "Qwen2", 4, hidden_size=48, num_hidden_layers=3
    )


@pytest.fixture
def options():
    """Engine options that suit the small models of these tests."""
    return dict(OPTIONS)


@pytest.fixture(scope="module")
def llm(model_dir):
    """One engine that the tests of a module share."""
    with LLM(model_dir, **OPTIONS) as opened_llm:
        yield opened_llm
