"""`bench/quality.py`: metrics from logits, references from a GGUF file, texts, tables."""

import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_files.models import write_model
from quality.job import JobError, run_job, run_separately, run_tool
from quality.metrics import Recorder
from quality.references import write_reference
from quality.texts import CALIBRATION, EVALUATION, TextError
from safetensors.torch import load_file, save_file

from end_to_end.checkpoints import make_checkpoint

CHUNKS = {"prose": [[5, 9, 3, 7, 11, 4, 8, 6] * 6], "code": [list(range(3, 40))]}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("model"), 64)


def checkpoint(folder, size):
    """Return a random model whose rows are whole blocks of `size` values."""
    make_checkpoint(folder, hidden_size=size, intermediate_size=size, head_dim=size // 4)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 10000.0}))
    return folder


def job(model, dtype="bfloat16", references=None, save_to=None, chunks=CHUNKS):
    return {
        "engine": "dovetail",
        "model": str(model),
        "options": {"dtype": dtype},
        "threads": 1,
        "chunks": chunks,
        "references": references or {},
        "save_to": save_to,
    }


def test_quality_metrics_equal_those_computed_with_torch_for_any_chunking(tmp_path):
    generator = torch.Generator().manual_seed(0)
    exact_PV = torch.randn(150, 40, generator=generator)
    other_PV = exact_PV + 0.3 * torch.randn(150, 40, generator=generator)
    ids = torch.randint(40, (151,), generator=generator).tolist()
    for logits_PV, references, save_to in (
        (exact_PV, {}, str(tmp_path)),
        (other_PV, {"exact": str(tmp_path)}, None),
    ):
        recorder = Recorder(references, save_to)
        recorder.begin("text", 0, ids)
        recorder.add(logits_PV[:100].numpy())
        recorder.add(logits_PV[100:].numpy())
        recorder.end()
    actual = recorder.result()["text"]
    log_p_PV, log_q_PV = exact_PV.log_softmax(-1), other_PV.log_softmax(-1)
    kl = torch.nn.functional.kl_div(log_q_PV, log_p_PV, log_target=True, reduction="batchmean")
    assert actual["kl"]["exact"] == pytest.approx(kl.item(), rel=1e-4)
    nll = torch.nn.functional.nll_loss(log_q_PV, torch.tensor(ids[1:]))
    assert actual["nll"] == pytest.approx(nll.item(), rel=1e-5)
    same = (exact_PV.argmax(-1) == other_PV.argmax(-1)).float().mean()
    assert actual["same_best"]["exact"] == pytest.approx(same.item())


@pytest.mark.parametrize("num_rows", [2, 4])
def test_a_wrong_number_of_positions_is_an_error(num_rows):
    recorder = Recorder({}, None)
    recorder.begin("text", 0, [1, 2, 3, 4])
    with pytest.raises(RuntimeError, match="positions"):
        recorder.add(np.zeros((num_rows, 8), np.float32))
        recorder.end()


def test_logits_that_are_not_finite_are_an_error():
    recorder = Recorder({}, None)
    recorder.begin("text", 0, [1, 2])
    with pytest.raises(RuntimeError, match="NaN"):
        recorder.add(np.full((1, 8), np.nan, np.float32))


@pytest.mark.costly
def test_damaged_weights_increase_the_divergence(model_dir, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(model_dir, damaged)
    weights = load_file(damaged / "model.safetensors")
    torch.manual_seed(0)
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name] = weights[name] + 0.1 * torch.randn_like(weights[name])
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    logits = {"float32": str(tmp_path / "logits")}
    exact = run_job(job(model_dir, "float32", save_to=logits["float32"]))
    again = run_job(job(model_dir, "float32", references=logits))
    bf16 = run_job(job(model_dir, references=logits))
    worse = run_job(job(damaged, references=logits))
    for text in CHUNKS:
        figures = [item["texts"][text] for item in (again, bf16, worse)]
        equal, rounded, broken = (figure["kl"]["float32"] for figure in figures)
        assert abs(equal) < 1e-6 < rounded < 0.5 * broken
        assert figures[0]["same_best"]["float32"] == 1.0
        assert figures[0]["perplexity"] == pytest.approx(exact["texts"][text]["perplexity"])
    assert (bf16["bytes_per_weight"], exact["bytes_per_weight"]) == (2.0, 4.0)


@pytest.mark.costly
def test_the_failure_of_a_job_in_a_separate_process_is_reported(tmp_path):
    with pytest.raises(JobError, match="no-such-model"):
        run_separately(sys.executable, job(tmp_path / "no-such-model"), 120)


def test_the_report_of_a_process_that_was_killed_names_the_signal():
    with pytest.raises(JobError, match="ended by SIGKILL: no output"):
        run_tool(["sh", "-c", "kill -KILL $$"], 60)
    with pytest.raises(JobError, match="exit code 3: the reason"):
        run_tool(["sh", "-c", "echo the reason >&2; exit 3"], 60)


def test_noise_in_reference_weights_is_at_most_half_a_quantization_step(model_dir, tmp_path):
    file = write_model(model_dir, tmp_path / "model.gguf", type_=GGMLQuantizationType.Q4_1)
    folders = {
        "published": write_reference(file, tmp_path / "published", off_grid=False),
        "noisy": write_reference(file, tmp_path / "noisy", off_grid=True),
        "again": write_reference(file, tmp_path / "again", off_grid=True),
    }
    by_name = {key: load_file(folder / "model.safetensors") for key, folder in folders.items()}
    original = load_file(model_dir / "model.safetensors")
    assert set(by_name["noisy"]) == set(original)
    for name, weight in original.items():
        published, noisy = by_name["published"][name].float(), by_name["noisy"][name].float()
        assert torch.equal(by_name["noisy"][name], by_name["again"][name])
        if weight.ndim == 1:
            assert torch.equal(published, noisy)
            continue
        blocks = weight.view(-1, 32)
        steps = (blocks.amax(1) - blocks.amin(1)) / 15
        ulp = 2**-7 * weight.abs().max()
        assert ((published - weight).view(-1, 32).abs() <= steps[:, None] / 2 + ulp).all(), name
        moved = (noisy - published).view(-1, 32).abs() / steps[:, None]
        assert (moved <= 0.5 + 2 * ulp / steps[:, None]).all(), name
        assert moved.mean().item() == pytest.approx(0.25, abs=0.02), name  # uniform noise


def test_the_error_for_a_type_with_unknown_quantization_steps_names_the_type(model_dir, tmp_path):
    wide = checkpoint(tmp_path / "wide", 256)
    file = write_model(wide, tmp_path / "model.gguf", type_=GGMLQuantizationType.TQ1_0)
    with pytest.raises(ValueError, match=r"\.weight has the type TQ1_0"):
        write_reference(file, tmp_path / "noisy", off_grid=True)


def test_an_evaluation_text_with_a_different_hash_is_rejected():
    other = replace(EVALUATION[2], sha256="0" * 64)
    with pytest.raises(TextError, match="source code: the text of pydantic"):
        other.excerpt()


def test_calibration_and_evaluation_data_come_from_different_packages():
    sources = {source for text in EVALUATION for source in text.sources.split(", ")}
    names = {source.split()[0] for source in sources}
    assert {text.domain for text in EVALUATION} - {text.domain for text in CALIBRATION} == {
        "French"
    }
    for text in CALIBRATION:
        assert names.isdisjoint(text.sources.replace("Debian ", "").split()), text.sources
