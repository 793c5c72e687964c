"""The demo model is as accurate in the engine as in transformers.

The model answers held-out questions of all ten tasks with greedy sampling, every installed
scheduler and every attention backend. An answer is correct if the task's checker accepts it and it
ends with EOS.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.config import EngineArgs
from dovetail.engine.choice import explain_choice
from dovetail.plugins import PluginRegistry
from dovetail.plugins.selection import SELECTED, USABLE

TASKS = pytest.importorskip("dovetail_demo_model.tasks").TASKS

SEED = 71
MAX_TOKENS = 112
BATCH = 100
MAX_DIFFERENCE = 0.005
PER_TASK, PER_TASK_LONG = 50, 200
"""Questions for each of the ten tasks; `make soak` uses the larger number."""


@cache
def questions(per_task: int) -> tuple[tuple[str, str], ...]:
    """Return (task, prompt) for each question."""
    from dovetail_demo_model.tasks import held_out_set

    return tuple(
        (name, prompt)
        for name, task in TASKS.items()
        for prompt, _ in held_out_set(task, per_task, SEED)
    )


@cache
def accuracy_through_transformers(per_task: int) -> float:
    """Return the share of correct answers that transformers' `generate` gives."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dovetail_demo_model import model_dir

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.bfloat16).eval()
    selected = sorted(questions(per_task), key=lambda question: len(question[1]))
    num_right = 0
    for first in range(0, len(selected), BATCH):
        part = selected[first : first + BATCH]
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for _, prompt in part
        ]
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            ids = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                temperature=None,
            )
        new = ids[:, batch["input_ids"].shape[1] :]
        ended = (new == tokenizer.eos_token_id).any(dim=1).tolist()
        results = tokenizer.batch_decode(new, skip_special_tokens=True)
        num_right += sum(
            end and TASKS[name].check(prompt, response)
            for (name, prompt), response, end in zip(part, results, ended, strict=True)
        )
    return num_right / len(selected)


def accuracy_through_engine(per_task: int, **parts: str) -> float:
    """Return the share of correct answers that an engine with these plugins gives."""
    selected = questions(per_task)
    chats = [[{"role": "user", "content": prompt}] for _, prompt in selected]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    with LLM("demo", num_threads=1, **parts) as llm:
        outputs = llm.chat(chats, params, use_tqdm=False)
    num_right = sum(
        output.outputs[0].finish_reason == "stop"
        and TASKS[name].check(prompt, output.outputs[0].text)
        for (name, prompt), output in zip(selected, outputs, strict=True)
    )
    return num_right / len(selected)


def installed(kind: str) -> list[str]:
    """Return the names of the installed plugins of a kind."""
    return sorted({candidate.name for candidate in PluginRegistry().candidates(kind)})


def usable_attention() -> list[str]:
    """Return the names of the attention backends that support the demo model on this machine."""
    verdicts = explain_choice("attention", EngineArgs(model="demo")).verdicts
    return sorted(verdict.name for verdict in verdicts if verdict.state in (USABLE, SELECTED))


PARTS = list(product(installed("scheduler"), usable_attention()))


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("scheduler", "attention"), PARTS)
def test_the_engine_is_as_accurate_as_transformers(scheduler, attention, note):
    compare(PER_TASK, note, scheduler, attention)


@pytest.mark.slow
@pytest.mark.parametrize(("scheduler", "attention"), PARTS)
def test_the_engine_is_as_accurate_as_transformers_on_many_questions(scheduler, attention, note):
    compare(PER_TASK_LONG, note, scheduler, attention)


def compare(per_task, note, scheduler, attention):
    own = accuracy_through_engine(per_task, scheduler_cls=scheduler, attention_backend=attention)
    other = accuracy_through_transformers(per_task)
    count = len(questions(per_task))
    note(f"{scheduler}, {attention}: {own:.2%} of {count}; transformers {other:.2%}")
    assert abs(own - other) <= MAX_DIFFERENCE
    assert own > 0.95
