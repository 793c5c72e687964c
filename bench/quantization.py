"""Measure the accuracy of quantized weights: KL divergence, most likely tokens, correct answers.

Method: teacher-forced logits at every position; each format is compared with bfloat16 linear layers
of torch on the same weights. Results: KL(bf16 || format) in nats, and the share of positions with
the same most likely token. Texts: held-out questions in the demo model's chat format with its own
answers, and random tokens on a random-weight checkpoint (`checkpoints.py`), which are the hardest
because its distributions are flat. Then the demo model answers held-out questions of its ten tasks
through the engine, greedily; an answer is right if the task's checker accepts it and it ends with
EOS. The results are deterministic, so one run is enough.

    python bench/quantization.py [--per-task 50] [--random-tokens 2048] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_checkpoint
from torch.nn import functional

from dovetail import LLM, SamplingParams
from dovetail.config import ModelDirectory
from dovetail.interfaces import ModelContext, RotaryArgs, WeightLoaderContext
from dovetail.plugins import PluginRegistry
from dovetail_torch.layers import TorchOps, pack_linears
from dovetail_torch.weights import SafetensorsLoader

RANDOM_MODEL = "llama-160m"
SEED = 2026
MAX_TOKENS = 112
TEXT_TOKENS = 256
REFERENCE = "torch"


@dataclass(frozen=True, kw_only=True)
class Format:
    """A linear method with its engine options."""

    name: str
    method: str
    options: Mapping[str, object]


FORMATS = (
    Format(name="bf16 native", method="native", options={}),
    Format(name="int8", method="int8", options={}),
    Format(name="int8, head bf16", method="int8", options={"head": "bfloat16"}),
    Format(name="q4_k", method="q4_k", options={}),
    Format(name="int4 g32", method="int4", options={}),
    Format(name="int4 g64", method="int4", options={"group_size": 64}),
    Format(name="int4 g128", method="int4", options={"group_size": 128}),
    Format(name="int4 g32, head int4", method="int4", options={"head": "int4"}),
)


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Divergence of a format from bfloat16. kl: mean in nats. top1: top-1 agreement."""

    kl: float
    top1: float
    num_positions: int


class SequenceAttention:
    """The attention context of one complete sequence: causal, without a cache."""

    def attend(
        self,
        index: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        rotary_args: RotaryArgs | None = None,
    ) -> torch.Tensor:
        """Return the attention output, [T, H, D]. Supports neither windows nor soft caps."""
        if rotary_args is not None:
            q_THD, k_TKD = rotary_args.apply(q_THD, k_TKD)
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q_THD, k_TKD, v_TKD))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    def narrow(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return all rows, because the logits of every position are needed."""
        return x_TD


def load_model(path: Path, method: str, options: Mapping[str, object]) -> Any:
    """Return the checkpoint's model in bfloat16, with linear layers packed by one method."""
    registry = PluginRegistry()
    config = json.loads((path / "config.json").read_text("utf-8"))
    method_cls = registry.load("linear_method", method)
    context = ModelContext(
        hf_config=config,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        linear_method=method_cls(options) if options else method_cls(),
        ops=TorchOps(),
        max_model_len=TEXT_TOKENS,
    )
    model = registry.load("model", ModelDirectory.open(path).architecture)(context)
    SafetensorsLoader(WeightLoaderContext(model_dir=path, progress=False)).load(model)
    pack_linears(model)
    return model


def logits_of(model: Any, texts: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
    """Yield the float32 logits of each text, [T, V]."""
    for text in texts:
        positions_T = torch.arange(len(text))
        hidden_TD = model(torch.tensor(text), positions_T, SequenceAttention())
        yield model.compute_logits(hidden_TD).float()


@torch.inference_mode()
def measure_divergence(
    path: Path, form: Format, texts: Sequence[Sequence[int]], reference: Sequence[torch.Tensor]
) -> Divergence:
    """Return the divergence of a format from `reference`, the bfloat16 logits of `texts`."""
    total_kl, same, count = 0.0, 0, 0
    model = load_model(path, form.method, form.options)
    for wanted_TV, got_TV in zip(reference, logits_of(model, texts), strict=True):
        log_p_TV, log_q_TV = wanted_TV.log_softmax(-1), got_TV.log_softmax(-1)
        total_kl += float((log_p_TV.exp() * (log_p_TV - log_q_TV)).sum())
        same += int((wanted_TV.argmax(-1) == got_TV.argmax(-1)).sum())
        count += len(wanted_TV)
    return Divergence(kl=total_kl / count, top1=same / count, num_positions=count)


@torch.inference_mode()
def reference_logits(path: Path, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return the logits of `texts` in bfloat16."""
    return list(logits_of(load_model(path, REFERENCE, {}), texts))


def questions(per_task: int) -> list[tuple[str, str]]:
    """Return (task, prompt) for each held-out question."""
    from dovetail_demo_model.tasks import TASKS, held_out_set

    return [
        (name, prompt)
        for name, task in TASKS.items()
        for prompt, _ in held_out_set(task, per_task, SEED)
    ]


def answer(
    form: Format | None, requested: Sequence[tuple[str, str]]
) -> tuple[float, list[list[int]]]:
    """Return the demo model's share of correct answers, and the token ids of each conversation.

    form: None for bfloat16 with torch's linear layers.
    """
    from dovetail_demo_model.tasks import TASKS

    method, options = (REFERENCE, {}) if form is None else (form.method, form.options)
    plugin_options = {f"linear_method:{method}": options} if options else {}
    with LLM("demo", dtype="bfloat16", linear_method=method, plugin_options=plugin_options) as llm:
        chats = [[{"role": "user", "content": prompt}] for _, prompt in requested]
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        outputs = llm.chat(chats, params, use_tqdm=False)
    right = sum(
        output.outputs[0].finish_reason == "stop"
        and TASKS[name].check(prompt, output.outputs[0].text)
        for (name, prompt), output in zip(requested, outputs, strict=True)
    )
    texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    return right / len(requested), [text[:TEXT_TOKENS] for text in texts]


def random_texts(num_tokens: int) -> list[list[int]]:
    """Return texts of random tokens, `num_tokens` in all."""
    source = random.Random(SEED)
    return [
        [source.randint(300, 7899) for _ in range(TEXT_TOKENS)]
        for _ in range(max(1, num_tokens // TEXT_TOKENS))
    ]


def report(per_task: int, random_tokens: int, formats: Sequence[Format] = FORMATS) -> list[dict]:
    """Return a row of results for each format. random_tokens: 0 omits the random model."""
    from dovetail_demo_model import model_dir

    requested = questions(per_task)
    accuracy, demo_texts = answer(None, requested)
    rows: list[dict] = [{"format": "bf16 torch", "right": accuracy}]
    subjects = {"demo": (Path(model_dir()), demo_texts)}
    if random_tokens:
        path = make_checkpoint(RANDOM_MODEL, Path(__file__).resolve().parents[1] / ".bench")
        subjects["random"] = (path, random_texts(random_tokens))
    logits = {name: reference_logits(*subject) for name, subject in subjects.items()}
    for form in formats:
        row: dict = {"format": form.name, "right": answer(form, requested)[0]}
        for name, (path, texts) in subjects.items():
            row[name] = asdict(measure_divergence(path, form, texts, logits[name]))
        rows.append(row)
    return rows


def print_table(rows: Sequence[dict], num_questions: int) -> None:
    """Print the rows as a Markdown table."""
    names = [name for name in ("demo", "random") if name in rows[-1]]
    head = "".join(f" {name}: KL, nats | {name}: same most likely token |" for name in names)
    print(f"| format |{head} demo: right of {num_questions} |")
    print("|---" * (2 + 2 * len(names)) + "|")
    for row in rows:
        cells = "".join(
            f" {row[name]['kl']:.5f} | {row[name]['top1']:.2%} |" if name in row else " – | – |"
            for name in names
        )
        print(f"| {row['format']} |{cells} {row['right']:.2%} |")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--per-task", type=int, default=50)
    parser.add_argument("--random-tokens", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = report(args.per_task, args.random_tokens)
    print_table(rows, len(questions(args.per_task)))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
