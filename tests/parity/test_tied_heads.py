"""Checkpoints with tied or separate LM heads are loaded as in transformers.

If config.json ties the LM head to the embedding, transformers ties the two weights if one is absent
or both are equal, and loads both (with a warning) if they differ.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dovetail import LLM, SamplingParams
from dovetail.errors import WeightError
from parity.checkpoints import make_checkpoint
from parity.rank_threads import TORCH_PARTS, RankThreads

CASE = "qwen3: tied, 4/2 heads of 36"
PROMPT = list(range(1, 40))
PARAMS = SamplingParams(temperature=0, max_tokens=3, logprobs=5, ignore_eos=True)
OPTIONS = {
    "skip_tokenizer_init": True,
    "use_tqdm_on_load": False,
    "max_model_len": 64,
    "max_num_seqs": 2,
    "num_threads": 1,
    "num_gpu_blocks_override": 16,
    "worker_cls": "cpu",
    "platform": "cpu",
    "plugin_options": {"worker:cpu": {"packed_cache": "off"}},
}
HEADS = ("absent", "equal", "different", "no table")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("tied")
    created = {}
    for head in HEADS:
        folder = base / head.replace(" ", "_")
        make_checkpoint(CASE, folder, seed=5)
        file = folder / "model.safetensors"
        weights = load_file(file)
        table_VD = weights["model.embed_tokens.weight"]
        if head != "absent":
            flipped_VD = table_VD.flip(0) if head == "different" else table_VD
            weights["lm_head.weight"] = flipped_VD.clone()
        if head == "no table":
            del weights["model.embed_tokens.weight"]
        save_file(weights, file, {"format": "pt"})
        created[head] = folder
    return created


def logprobs(folder: Path, **options: object) -> list[dict[int, float]]:
    with LLM(str(folder), **{**OPTIONS, **options}) as llm:
        (output,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    return [
        {token: item.logprob for token, item in step.items()} for step in output.outputs[0].logprobs
    ]


def ties(value: bool) -> dict[str, object]:
    return {"hf_overrides": {"tie_word_embeddings": value}}


@pytest.mark.costly
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", HEADS)
def test_the_lm_head_is_tied_in_the_same_cases_as_in_transformers(folders, head, tied, caplog):
    folder = folders[head]
    if not tied and head in ("absent", "no table"):
        # transformers fills missing weights at random, so that its output cannot be compared.
        with pytest.raises(WeightError, match=r"missing 1 weight "):
            logprobs(folder, dtype="float32", **ties(tied))
        return
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        folder, tie_word_embeddings=tied, dtype=torch.float32
    ).eval()
    with torch.inference_mode():
        theirs_V = oracle(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    with caplog.at_level(logging.WARNING, "dovetail_torch"):
        first, *_ = logprobs(folder, dtype="float32", **ties(tied))
    assert set(first) == set(theirs_V.topk(5).indices.tolist())
    assert all(abs(theirs_V[token] - value) < 1e-4 for token, value in first.items())
    warned = [record.getMessage() for record in caplog.records if "not tied" in record.message]
    assert len(warned) == (tied and head == "different")
    assert all("lm_head.weight" in text and "embed_tokens" in text for text in warned)


@pytest.mark.costly
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32", "executor_backend": RankThreads, "tensor_parallel_size": 2}
        | TORCH_PARTS,
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"dtype": "bfloat16", "quantization": "int4"},
    ],
    ids=["two ranks", "bfloat16", "int8", "int4"],
)
def test_a_separate_lm_head_works_with_two_ranks_and_all_linear_methods(folders, options):
    if "quantization" in options:
        native_library = pytest.importorskip("dovetail_cpu.native_library")
        if not native_library.probe_any().usable:
            pytest.skip("native kernels are not available on this machine")
    own = logprobs(folders["different"], **ties(False), **options)
    assert logprobs(folders["different"], **ties(True), **options) == own
    assert logprobs(folders["equal"], **ties(True), **options) != own
