"""Compare rules for the scales of int4 on the calibration data, not on the evaluation data.

    python bench/int4_rules.py [--model FILE.gguf] [--texts calibration|evaluation] [--chunks 2]

Method: the linear layers of the decoder are rounded with each rule and computed in float32, so that
only the rule differs; the embedding, which is also the head, is not rounded. The weights are those
of the file with noise (`quality/references.py`). Prints the mean KL divergence from float32 for
each text. Rules, for groups of 32 with codes from -8 to 7:

greatest   the weight with the greatest magnitude gets the code -8 (as in GGUF's Q4_0)
fitted     the same codes; the scale minimizes the squared error (`int4` of Dovetail)
clipped    of 16 scales that clip the greatest weights, refined like `fitted`, the one with the
           least squared error
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from quality.job import run_job
from quality.report import mean
from quality.texts import CALIBRATION, EVALUATION
from safetensors.torch import load_file, save_file

GROUP = 32
NUM_CANDIDATES = 16
LOWEST_SHARE = 0.7
"""The smallest scale of `clipped`, as a share of the scale of `greatest`."""

Rule = Callable[[torch.Tensor], torch.Tensor]
"""Rounds weights [..., 32], each row with one scale."""


def greatest(weight_GK: torch.Tensor) -> torch.Tensor:
    """Round so that the weight with the greatest magnitude has the code -8."""
    scale_G1 = _scales(weight_GK)
    return scale_G1 * _codes(weight_GK, scale_G1)


def fitted(weight_GK: torch.Tensor) -> torch.Tensor:
    """Use the codes of `greatest` with the scale that minimizes the squared error."""
    return _fitted(weight_GK, _scales(weight_GK))


def clipped(weight_GK: torch.Tensor) -> torch.Tensor:
    """Use the best of several scales, which may clip the greatest weights."""
    best_GK = fitted(weight_GK)
    for share in torch.linspace(LOWEST_SHARE, 1.0, NUM_CANDIDATES):
        other_GK = _fitted(weight_GK, share * _scales(weight_GK))
        is_better_G1 = _error(other_GK, weight_GK) < _error(best_GK, weight_GK)
        best_GK = torch.where(is_better_G1, other_GK, best_GK)
    return best_GK


RULES: dict[str, Rule] = {"greatest": greatest, "fitted": fitted, "clipped": clipped}


def _scales(weight_GK: torch.Tensor) -> torch.Tensor:
    place_G1 = weight_GK.abs().argmax(-1, keepdim=True)
    return weight_GK.gather(-1, place_G1) / -8


def _codes(weight_GK: torch.Tensor, scale_G1: torch.Tensor) -> torch.Tensor:
    return torch.where(scale_G1 == 0, 0, weight_GK / scale_G1).round().clamp(-8, 7)


def _fitted(weight_GK: torch.Tensor, scale_G1: torch.Tensor) -> torch.Tensor:
    code_GK = _codes(weight_GK, scale_G1)
    squares_G1 = code_GK.square().sum(-1, keepdim=True)
    return code_GK * (weight_GK * code_GK).sum(-1, keepdim=True) / squares_G1.clamp(min=1)


def _error(rounded_GK: torch.Tensor, weight_GK: torch.Tensor) -> torch.Tensor:
    return (rounded_GK - weight_GK).square().sum(-1, keepdim=True)


def write_rounded(exact: Path, folder: Path, rule: Rule) -> Path:
    """Write a copy of a model directory with rounded decoder layers, in float32."""
    folder.mkdir()
    for file in exact.glob("*.json"):
        (folder / file.name).symlink_to(file)
    tensors = {
        name: weight.float() for name, weight in load_file(exact / "model.safetensors").items()
    }
    for name, weight in tensors.items():
        if ".layers." in name and weight.ndim == 2:
            tensors[name] = rule(weight.view(-1, GROUP)).view(weight.shape).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def main() -> None:
    """Print the KL divergence of each rule."""
    from quality.references import write_reference
    from quality.run import read_texts

    from dovetail.config.model_sources import find_model
    from dovetail.plugins import PluginRegistry
    from dovetail_gguf.tokenizer import GGUFTokenizer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="a GGUF file or a model's name")
    parser.add_argument("--texts", default="calibration", choices=("calibration", "evaluation"))
    parser.add_argument("--chunks", type=int, default=2, help="chunks per text")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    source = find_model(args.model, PluginRegistry()) or Path(args.model).absolute()
    texts = CALIBRATION if args.texts == "calibration" else EVALUATION
    chunks, absent = read_texts(GGUFTokenizer.from_directory(source), texts, args.chunks)
    for domain, reason in absent.items():
        print(f"{domain}: {reason}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        exact = write_reference(source, folder / "exact", off_grid=True)
        job = {
            "engine": "dovetail",
            "options": {"dtype": "float32"},
            "threads": args.threads,
            "chunks": chunks,
        }
        logits = str(folder / "logits")
        run_job({**job, "model": str(exact), "references": {}, "save_to": logits})
        print("rule", *chunks, "mean", sep="\t")
        for name, rule in RULES.items():
            model = str(write_rounded(exact, folder / name, rule))
            row = run_job(
                {**job, "model": model, "references": {"float32": logits}, "save_to": None}
            )
            kl = [text["kl"]["float32"] for text in row["texts"].values()]
            print(
                name, *(f"{x:.4f}" for x in [*kl, mean(row, "kl", "float32")]), sep="\t", flush=True
            )


if __name__ == "__main__":
    main()
