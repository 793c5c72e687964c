"""No reader of external bytes opens a pickle: sockets, rings, boot files, caches, checkpoints.

`tests/architecture/test_no_pickle.py` checks that no shipped module imports pickle; these tests
send pickles. The socket of a running engine is tested in `core/tests/engine_process`.
"""

import os
import pickle
import shutil
import zipfile

import pytest
from security.canary import PROTOCOLS, make_canary
from security.doors import doors

from dovetail import LLM
from dovetail.errors import DovetailError
from dovetail_cpu.packed_cache.packed_file import PackedFileError
from dovetail_demo_model import model_dir

DOORS = doors()
LEAST_TRIED = 4


@pytest.fixture
def trace(tmp_path):
    """The folder that a canary creates when it is opened; it must not exist at the end."""
    folder = tmp_path / "opened"
    yield folder
    assert not folder.exists(), "the pickle was opened"


def is_accepted(door, content):
    try:
        door.read(content)
    except (DovetailError, PackedFileError):
        return False
    return True


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_opened_canary_leaves_a_trace(protocol, tmp_path):
    content = make_canary(tmp_path / "opened", protocol)
    assert not (tmp_path / "opened").exists()
    pickle.loads(content)
    assert (tmp_path / "opened").exists()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", DOORS)
def test_no_door_opens_a_pickle(name, protocol, trace):
    door = DOORS[name]
    num_open = len(os.listdir("/proc/self/fd"))
    tried = [
        is_accepted(door, content) for content in door.form(door.good, make_canary(trace, protocol))
    ]
    assert len(tried) >= LEAST_TRIED
    assert not all(tried), "this door refuses no content"
    assert len(os.listdir("/proc/self/fd")) == num_open


@pytest.mark.parametrize("name", DOORS)
def test_every_door_accepts_valid_bytes(name):
    DOORS[name].read(DOORS[name].good)


def checkpoint(tmp_path):
    """Return a copy of the installed checkpoint."""
    return shutil.copytree(model_dir(), tmp_path / "model")


FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "special_tokens_map.json",
)


def start(folder):
    with pytest.raises(DovetailError) as refusal:
        LLM(folder, num_threads=1, kv_cache_memory_bytes=1 << 20, use_tqdm_on_load=False)
    return str(refusal.value)


@pytest.mark.parametrize("name", FILES)
def test_no_file_of_a_checkpoint_is_opened_as_a_pickle(name, tmp_path, trace):
    folder = checkpoint(tmp_path)
    (folder / name).write_bytes(make_canary(trace, 2))
    if name.endswith(".index.json"):
        (folder / "model.safetensors").unlink()
    assert name in start(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
def test_pickled_weights_are_never_read(name, tmp_path, trace):
    folder = checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    with zipfile.ZipFile(folder / name, "w") as archive:  # the format that torch.save writes
        archive.writestr("archive/data.pkl", make_canary(trace, 2))
        archive.writestr("archive/version", "3\n")
    message = start(folder)
    assert name in message and "never" in message
