"""`bench/quality.py --fidelity`: metrics of each position, and comparisons of two engines."""

import json
import math
import sys

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_files.models import write_model
from quality import fidelity
from quality.positions import PositionRecorder

from end_to_end.checkpoints import make_checkpoint


def recorded(chunks, logits):
    recorder = PositionRecorder()
    for number, (ids, logits_PV) in enumerate(zip(chunks, logits, strict=True)):
        recorder.begin("text", number, ids)
        recorder.add(logits_PV)
        recorder.end()
    return recorder.result()["text"]


def test_the_metrics_of_each_position_equal_those_computed_with_torch():
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(90, 40, generator=generator) for _ in range(2)]
    chunks = [torch.randint(40, (91,), generator=generator).tolist() for _ in range(2)]
    actual = recorded(chunks, [item.numpy() for item in logits])
    logits_PV = torch.cat(logits)
    targets_P = torch.tensor([token for ids in chunks for token in ids[1:]])
    nll_P = torch.nn.functional.cross_entropy(logits_PV, targets_P, reduction="none")
    top_P2 = logits_PV.topk(2).values
    assert actual["nll"] == pytest.approx(nll_P.tolist(), rel=1e-5)
    assert actual["best"] == logits_PV.argmax(-1).tolist()
    assert actual["margin"] == pytest.approx((top_P2[:, 0] - top_P2[:, 1]).tolist(), abs=1e-5)


@pytest.mark.parametrize("num_rows", [2, 4])
def test_a_wrong_number_of_positions_is_an_error(num_rows):
    with pytest.raises(RuntimeError, match="positions"):
        recorded([[1, 2, 3, 4]], [np.zeros((num_rows, 8), np.float32)])


def test_logits_that_are_not_finite_are_an_error():
    with pytest.raises(RuntimeError, match="NaN"):
        recorded([[1, 2]], [np.full((1, 8), np.nan, np.float32)])


def test_the_share_of_equal_tokens_counts_only_positions_with_a_sufficient_margin():
    reference = {"nll": [1.0, 2.0, 3.0, 2.0], "best": [1, 2, 3, 4], "margin": [0.05, 0.2, 0.3, 2.0]}
    row = {"nll": [1.2, 2.0, 3.0, 2.2], "best": [9, 2, 3, 9], "margin": [1.0] * 4}
    actual = fidelity.compare(row, reference)
    assert actual["change"] == pytest.approx(math.exp(0.1) - 1)
    assert actual["error"] == pytest.approx(0.1 / 2)
    assert actual["same_best"] == pytest.approx({"0.0": 0.5, "0.1": 2 / 3, "0.5": 0.0})
    with pytest.raises(ValueError, match="4 and 3 positions"):
        fidelity.compare(row, {**reference, "nll": [1.0, 2.0, 3.0]})


@pytest.mark.costly
def test_without_llama_cpp_only_dovetail_is_measured_with_blocks_and_in_float32(tmp_path):
    make_checkpoint(tmp_path, hidden_size=64, intermediate_size=64, head_dim=16)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_theta": 10000.0}))
    file = write_model(tmp_path, tmp_path / "model.gguf", type_=GGMLQuantizationType.Q4_1)
    chunks = {"prose": [[5, 9, 3, 7, 11, 4, 8, 6] * 6]}
    rows, absent = fidelity.measure(file, chunks, {"dovetail": sys.executable}, 1)
    assert list(rows) == [fidelity.FLOAT32, fidelity.BLOCKS]
    assert list(absent) == [fidelity.PEER_FLOAT32, fidelity.PEER_BLOCKS]
    assert all("no Python interpreter for llamacpp" in reason for reason in absent.values())
    origin = {"command": "c", "commit": "d", "date": "e", "settings": {"texts": {"prose": "p"}}}
    result = {"origin": origin, "rows": fidelity.summary(rows), "absent": absent}
    change = result["rows"][fidelity.BLOCKS]["prose"]["against"][fidelity.FLOAT32]["change"]
    assert 0 < abs(change) < 0.05
    printed = fidelity.write(result, tmp_path)
    assert f"{100 * change:+.2f} ±" in printed
    assert (tmp_path / "fidelity.md").read_text() == printed
