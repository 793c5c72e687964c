"""The table of architectures in docs/models.md, made from the cases of the parity tests.

The tests compare every case with transformers, so that each row stands for a tested family.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from gguf.constants import MODEL_ARCH_NAMES
from gguf_files.families import CONVERSIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from parity.fallback_checkpoints import ONE_RANK_ONLY, REJECTED, SERVED
from parity.family_checkpoints import FAMILIES

PAGE = Path(__file__).resolve().parents[2] / "docs/models.md"
START, END = "<!-- architectures: made by tests/docs/record_models.py -->\n", "<!-- end -->\n"
_FIRST = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama, mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Families with their own tests (test_engine_parity.py), and their names in GGUF files."""


def render() -> str:
    """Return the section with all tables."""
    variants: dict[str, list[str]] = defaultdict(list)
    for name, family in FAMILIES.items():
        variants[family.model].append(name)
    files: dict[str, set[str]] = defaultdict(set)
    for conversion in CONVERSIONS.values():
        files[conversion.family.model].add(MODEL_ARCH_NAMES[conversion.architecture])
    lines = [
        "| architecture in config.json | GGUF architectures | tested variants |",
        "|---|---|---|",
    ]
    rows = {name: (files_, "see test_engine_parity.py") for name, files_ in _FIRST.items()}
    rows |= {
        name: (", ".join(sorted(files[name])), "; ".join(names)) for name, names in variants.items()
    }
    lines += [f"| `{name}` | {gguf} | {tests} |" for name, (gguf, tests) in sorted(rows.items())]
    served = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] for name in SERVED)
    one_rank = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] for name in ONE_RANK_ONLY)
    rejected = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] for name in REJECTED)
    return "\n".join(
        [
            *lines,
            "",
            f"Tested with the fallback to transformers ({len(served)}):\n{_codes(served)}.",
            "",
            "With one rank only, because transformers has no tensor-parallel plan for the layers:\n"
            f"{_codes(one_rank)}.",
            "",
            f"Rejected by the fallback to transformers, tested:\n{_codes(rejected)}.",
            "",
        ]
    )


def _codes(names: list[str]) -> str:
    lines, line = [], ""
    for name in names:
        item = f"`{name}`, "
        if len(line) + len(item) > 118:
            lines.append(line.rstrip())
            line = ""
        line += item
    return "\n".join([*lines, line.removesuffix(", ")]) if names else ""


def replaced(page: str) -> str:
    """Return the page with an up-to-date section."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return before + START + render() + END + after


def record_section() -> None:
    """Write the current section to the page."""
    PAGE.write_text(replaced(PAGE.read_text("utf-8")), "utf-8")
