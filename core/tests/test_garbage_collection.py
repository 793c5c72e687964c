"""The garbage collector pauses while plugins are imported and the front end is prepared."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from dovetail.config import EngineArgs
from dovetail.engine.front_end import FrontEndParts
from dovetail.plugins.loading import (
    MANY_OBJECTS,
    Origin,
    load_target,
    paused_garbage_collection,
)
from dovetail_devkit.fakes.platform import FakePlatform
from dovetail_devkit.fakes.tokenizer import ByteTokenizer

YOUNG = (0, 1)


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    """Unfreeze all objects during a test. Then enable the collector and freeze them again."""
    gc.unfreeze()
    yield
    gc.enable()
    gc.freeze()


def test_garbage_collection_resumes_when_the_with_block_ends_or_raises() -> None:
    with paused_garbage_collection():
        assert not gc.isenabled()
        with paused_garbage_collection():
            pass
        assert not gc.isenabled()  # the outer block continues
    assert gc.isenabled()
    with pytest.raises(KeyError), paused_garbage_collection():
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_the_program_disabled_stays_disabled() -> None:
    gc.disable()
    with paused_garbage_collection():
        pass
    assert not gc.isenabled()


def test_objects_created_during_a_pause_move_to_the_oldest_generation() -> None:
    with paused_garbage_collection():
        created = [[] for _ in range(MANY_OBJECTS)]
    assert not any(found is created for young in YOUNG for found in gc.get_objects(young))
    assert any(found is created for found in gc.get_objects(2))


@pytest.mark.costly
def test_a_pause_does_not_unfreeze_frozen_objects() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with paused_garbage_collection():
        created = [[] for _ in range(MANY_OBJECTS)]
    assert gc.get_freeze_count() == count
    assert created


def test_a_pause_with_few_new_objects_does_not_visit_all_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("freeze", "unfreeze", "get_freeze_count"):
        monkeypatch.setattr(gc, name, lambda: pytest.fail("all objects were visited"))
    gc.collect(0)  # earlier tests may have left many young objects
    with paused_garbage_collection():
        created = [[] for _ in range(100)]
    monkeypatch.undo()
    assert created


@pytest.mark.costly
def test_cyclic_garbage_created_during_a_pause_is_collected_later() -> None:
    class Node:
        alive = 0

        def __init__(self) -> None:
            self.me = self
            Node.alive += 1

        def __del__(self) -> None:
            Node.alive -= 1

    with paused_garbage_collection():
        Node()
    assert Node.alive == 1
    gc.collect()
    assert Node.alive == 0


def test_garbage_collection_is_paused_while_a_plugin_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugin_seeing_gc.py").write_text(
        "import gc\nclass Part:\n    collects = gc.isenabled()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    part = load_target("plugin_seeing_gc:Part", Origin(reference="part"))
    assert vars(part)["collects"] is False
    assert gc.isenabled()


class TokenizerSeeingCollector(ByteTokenizer):
    collects: bool

    @classmethod
    def from_directory(cls, path: Path) -> Self:
        cls.collects = gc.isenabled()
        return cls()


def test_garbage_collection_is_paused_while_the_tokenizer_is_loaded(tmp_path: Path) -> None:
    config = {"architectures": ["None"], "vocab_size": 259, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = EngineArgs(
        model=tmp_path, platform=FakePlatform, tokenizer_mode=TokenizerSeeingCollector
    )
    FrontEndParts.of(args.create_engine_config())
    assert TokenizerSeeingCollector.collects is False
    assert gc.isenabled()
