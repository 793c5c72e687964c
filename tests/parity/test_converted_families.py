"""Families in GGUF files, converted to checkpoints, agree with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from gguf_files.expert_families import EXPERT_CONVERSIONS
from gguf_files.families import CONVERSIONS, write_family

from dovetail_convert.convert_options import ConvertOptions
from dovetail_convert.run import run
from parity.checkpoints import VOCAB_SIZE
from parity.commit_seed import commit_seed
from parity.family_checkpoints import make_model

PROMPT_LEN = 150
"""Tokens, more than the sliding windows."""
TOLERANCE = 1e-4


def largest_difference(name: str, folder: Path, kind: GGMLQuantizationType) -> float:
    """Return the difference of log probabilities between a family and its converted GGUF file."""
    conversion = CONVERSIONS[name]
    seed = commit_seed()[0]
    model = make_model(conversion.family, name, seed)
    file = write_family(conversion, model, folder / "model.gguf", kind)
    options = ConvertOptions(
        out=folder / "converted",
        dtype="float32",
        max_shard_size="100KB",
        skip_tokenizer_init=True,
    )
    run(str(file), options, print)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        options.out,
        dtype="float32",
        output_loading_info=True,
        attn_implementation=conversion.family.attention,
    )
    assert not any(report.values()), report
    assert type(loaded) is type(model)
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, VOCAB_SIZE, (1, PROMPT_LEN), generator=generator)
    with torch.no_grad():
        actual, expected = (own(prompt).logits[0].log_softmax(-1) for own in (loaded, model))
    return float((actual - expected).abs().max())


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_family_in_a_converted_gguf_file_agrees_with_transformers(name, tmp_path):
    assert largest_difference(name, tmp_path, GGMLQuantizationType.F32) <= TOLERANCE


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", ("gptneox", "phi3", *EXPERT_CONVERSIONS))
def test_converted_blocks_agree_with_transformers_on_dequantized_weights(name, tmp_path):
    kind = GGMLQuantizationType.MXFP4 if name == "gpt-oss" else GGMLQuantizationType.Q8_0
    assert largest_difference(name, tmp_path, kind) <= TOLERANCE
