"""Tests of the training script: a resumed run ends with the weights of an uninterrupted run."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

TRAINING = Path(__file__).parents[1] / "training"


@pytest.fixture
def train(monkeypatch):
    """Import the training script with a tiny network and tiny batches."""
    names = {path.stem for path in TRAINING.glob("*.py")}
    monkeypatch.syspath_prepend(str(TRAINING))
    import train

    tiny = replace(
        train.SHAPES["draft"],
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
    )
    monkeypatch.setitem(train.SHAPES, "draft", tiny)
    monkeypatch.setattr(train, "ROWS", 2)
    monkeypatch.setattr(train, "LONG_ROWS", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield train
    torch.set_num_threads(threads)
    for name in names:
        sys.modules.pop(name, None)


def _weights(train, tokenizer, folder, stops):
    """Train up to each stop, each time from the saved state. Return the last weights."""
    folder.mkdir()
    for stop in stops:
        args = argparse.Namespace(size="draft", steps=8, eager=True, out=folder)
        run = train.build_run(args, tokenizer)
        progress = train.train(run, tokenizer, stop, 0)
        assert progress.step == stop
    return run.network.state_dict()


def test_an_interrupted_training_run_continues_to_the_same_weights(train, tmp_path):
    tokenizer = train.train_tokenizer(train.SEED)
    whole = _weights(train, tokenizer, tmp_path / "whole", (8,))
    parts = _weights(train, tokenizer, tmp_path / "parts", (3, 8))
    start = train.Llama(train.SHAPES["draft"]).state_dict()
    for name, weight in whole.items():
        assert torch.equal(weight, parts[name])
        assert weight.shape == start[name].shape
    assert not torch.equal(whole["model.norm.weight"], start["model.norm.weight"])


def test_a_command_that_continues_a_run_is_recorded_once(train, tmp_path):
    args = argparse.Namespace(size="draft", steps=8, stop_at=None, out=tmp_path)
    for stop in (3, 3, None, None):
        args.stop_at = stop
        train.record_command(args)
    assert (tmp_path / "commands.txt").read_text().splitlines() == [
        "--size draft --steps 8 --stop-at 3",
        "--size draft --steps 8",
    ]
