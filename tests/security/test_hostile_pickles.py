"""No reader of sockets, rings, boot files, caches or checkpoints opens a pickle.

`tests/architecture/test_no_pickle.py` checks that no shipped module imports pickle; these tests
send pickles. The socket of a running engine is tested in `core/tests/engine_process`.
"""

import os
import pickle
import shutil
import zipfile

import pytest
from security.byte_readers import byte_readers
from security.hostile_pickles import PROTOCOLS, make_hostile_pickle

from dovetail import LLM
from dovetail.errors import DovetailError
from dovetail_cpu.packed_cache.packed_file import PackedFileError
from dovetail_demo_model import model_dir

READERS = byte_readers()
MIN_TRIED = 4


@pytest.fixture
def trace(tmp_path):
    """The directory that a hostile pickle creates when it is loaded. It must not exist."""
    folder = tmp_path / "opened"
    yield folder
    assert not folder.exists(), "the pickle was opened"


def is_accepted(reader, content):
    try:
        reader.read(content)
    except (DovetailError, PackedFileError):
        return False
    return True


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_unpickling_a_hostile_pickle_creates_the_marker_file(protocol, tmp_path):
    content = make_hostile_pickle(tmp_path / "opened", protocol)
    assert not (tmp_path / "opened").exists()
    pickle.loads(content)
    assert (tmp_path / "opened").exists()


@pytest.mark.costly
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", READERS)
def test_no_reader_opens_a_pickle(name, protocol, trace):
    reader = READERS[name]
    num_open = len(os.listdir("/proc/self/fd"))
    tried = [
        is_accepted(reader, content)
        for content in reader.form(reader.good, make_hostile_pickle(trace, protocol))
    ]
    assert len(tried) >= MIN_TRIED
    assert not all(tried), "this reader rejects no hostile content"
    assert len(os.listdir("/proc/self/fd")) == num_open


@pytest.mark.parametrize("name", READERS)
def test_every_reader_accepts_valid_bytes(name):
    READERS[name].read(READERS[name].good)


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
    with pytest.raises(DovetailError) as rejection:
        LLM(folder, num_threads=1, kv_cache_memory_bytes=1 << 20, use_tqdm_on_load=False)
    return str(rejection.value)


@pytest.mark.costly
@pytest.mark.parametrize("name", FILES)
def test_no_file_of_a_checkpoint_is_opened_as_a_pickle(name, tmp_path, trace):
    folder = checkpoint(tmp_path)
    (folder / name).write_bytes(make_hostile_pickle(trace, 2))
    if name.endswith(".index.json"):
        (folder / "model.safetensors").unlink()
    assert name in start(folder)


@pytest.mark.costly
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
def test_pickled_weights_are_not_read(name, tmp_path, trace):
    folder = checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    with zipfile.ZipFile(folder / name, "w") as archive:  # the format that torch.save writes
        archive.writestr("archive/data.pkl", make_hostile_pickle(trace, 2))
        archive.writestr("archive/version", "3\n")
    message = start(folder)
    assert name in message and "never" in message
