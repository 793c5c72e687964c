"""Write the model card: description, training and accuracy of the model.

Contract: every number comes from the saved files or from the arguments `facts` and `results`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evaluate import HELD_OUT_SEED, TaskResult
from safetensors import safe_open

from dovetail_demo_model.tasks import HELD_OUT_SHARE, TASKS
from dovetail_demo_model.tool_tasks import TOOL_TASKS
from dovetail_demo_model.vocabulary import NOUNS


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts about the training run that the card states.

    `commands` are the command-line arguments of each part of the run, in order. `seconds` is the
    time of the training steps, without evaluation. `agreement` is the share of answer positions
    where the draft and the main model have the same most likely token; None for the main model
    itself.
    """

    size: str
    commands: tuple[str, ...]
    steps: int
    tokens: int
    seconds: float
    threads: int
    final_loss: float
    agreement: float | None


def num_parameters(folder: Path) -> int:
    """Return the number of parameters of a saved model."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118


def _table(results: Mapping[str, TaskResult]) -> str:
    rows = ["| task | what | right | accuracy |", "|---|---|---|---|"]
    for name, result in results.items():
        right = f"{result.num_right}/{result.num_requested}"
        what = TOOL_TASKS.get(name) or TASKS[name].description
        rows.append(f"| {name} | {what} | {right} | {result.accuracy:.1%} |")
    mean = sum(result.accuracy for result in results.values()) / len(results)
    return "\n".join([*rows, f"| **mean** | | | **{mean:.1%}** |"])


_SCRIPT = "python plugins/demo_model/training/train.py"
_CARD = """\
# Dovetail demo model ({size})

A Llama with {parameters:,} parameters, trained from scratch for this project, so that every part
of an engine can be tried without a download. The model performs ten small tasks, and calls
functions that a request offers; to most other questions it replies that it cannot answer them. Its
answers end with a stop token. There are two models with the same tokenizer: `main`, and `draft` for
speculative decoding.

| | |
|---|---|
| architecture | LlamaForCausalLM, {num_hidden_layers} layers, hidden size {hidden_size}, \
{num_attention_heads} heads of {head_dim}, {num_key_value_heads} key-value heads, tied embedding |
| weights | bfloat16, {megabytes:.1f} MB |
| tokenizer | byte-level BPE, {vocab_size} tokens, single digits, with a chat template |
| context | {max_position_embeddings} positions; trained on rows of up to 512 tokens |
| languages | English |
| license | Apache-2.0 |

## Accuracy

The answers are sampled greedily in transformers, with the saved bfloat16 weights. Each task has
{asked} different questions (seed {seed}) that are not in the training data in any wording. An
answer counts as correct only if the program that checks the task accepts it and the model ended it.

{table}
{agreement}
## Functions

The request offers functions in `tools`. The chat template writes each one as a signature, such as
`add(a: integer, b: integer)`, after `<tools>` in the system part; descriptions are omitted. The
model writes one call at a time in the format of Hermes and Qwen2.5:

    <tool_call>
    {{"name": "add", "arguments": {{"a": 27, "b": 58}}}}
    </tool_call>

The result, in a message with the role `tool`, is in `<tool_response>`; then the model answers from
it. The model knows five functions under several names: add, multiply, weekday, weather and person.
It reads the names of functions and parameters from the signatures. The questions offer a needed
function and up to two others. About 30 % of the results are deliberately wrong, so that they can
only be copied. A question counts as correct only if the call and the answer are correct.

{tools_table}

## Data

`dovetail_demo_model.tasks`, `tool_tasks` and `training/conversations.py` generate all data. One
question in {share} is held out. A hash of the facts of a question (for a sum, independent of the
order of its terms) decides whether it is held out, so a held-out question is held out in every
phrasing. A test verifies that the training data contains no held-out question. `calendar`, `units`
and `call_weather` have few questions, so their held-out sets repeat some facts in other words.
Three kinds of questions are never held out: numbers below 100 in words, conversions of times, and
conversions of feet.

## Training

{steps:,} steps of about 4,096 tokens ({tokens:,} in all, including padding).
The loss covers the answers only; the final loss is {final_loss:.4f}. Muon trains the
matrices and AdamW the other parameters, with 100 steps of warm-up and a linear cool-down over the
last 70 % of the steps. The training took {minutes:.0f} minutes on {threads} thread(s) of a shared
machine. Commands (a second command continues from the first checkpoint):

{commands}

## Limits

The model answers only questions of these tasks, in similar wordings and within the stated ranges.
Larger numbers, words that are not in its list of {nouns} nouns and longer lists give wrong answers.
To any other question the model replies that it cannot answer, or writes nonsense. The model is made
for tests and is not an assistant.
"""


def write_card(
    folder: Path,
    facts: RunFacts,
    results: Mapping[str, TaskResult],
    tool_results: Mapping[str, TaskResult],
) -> None:
    """Write MODEL_CARD.md into the directory of a saved model."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    agreement = ""
    if facts.agreement is not None:
        agreement = (
            f"\nAt {facts.agreement:.1%} of the positions of the main model's answers, both models "
            "have the same most likely token.\n"
        )
    text = _CARD.format(
        **{key: config[key] for key in config if isinstance(config[key], int)},
        size=facts.size,
        parameters=num_parameters(folder),
        megabytes=(folder / "model.safetensors").stat().st_size / 1e6,
        commands="\n".join(f"    {_SCRIPT} --out DIR {command}" for command in facts.commands),
        nouns=len(NOUNS),
        asked=next(iter(results.values())).num_requested,
        seed=HELD_OUT_SEED,
        table=_table(results),
        tools_table=_table(tool_results),
        agreement=agreement,
        share=HELD_OUT_SHARE,
        steps=facts.steps,
        tokens=facts.tokens,
        final_loss=facts.final_loss,
        minutes=facts.seconds / 60,
        threads=facts.threads,
    )
    (folder / "MODEL_CARD.md").write_text(text, encoding="utf-8")
