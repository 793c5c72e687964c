"""Train the demo model (or its draft) from scratch: data, tokenizer, network, card.

Contract: the same arguments give the same data, order and schedule; the weights differ between
machines only by rounding. The result is a Hugging Face directory in --out, with the accuracy of
the saved files in its model card. One CPU core is enough.

Usage: python plugins/demo_model/training/train.py --out DIR [--size main|draft]
       [--steps N | --minutes N] [--threads 2] [--eager] [--main MAIN_DIR]
The run writes a checkpoint (DIR/checkpoint.pt) every few minutes; the next run continues from it.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from card import RunFacts, write_card
from evaluate import agreement, evaluate, evaluate_tools
from export import export
from network import Llama, Shape
from optimizer import Schedule, apply_step, build_optimizers
from packing import Packer
from tokenizer import VOCAB_SIZE, ConversationEncoder, train_tokenizer
from tokenizers import Tokenizer
from torch import nn

from dovetail_demo_model.tasks import TASKS

SEED = 2026
ROWS, ROW_LENGTH = 16, 256
LONG_ROWS, LONG_ROW_LENGTH = 8, 512
LONG_EVERY = 10
WARMUP_STEPS = 100
COOLDOWN_SHARE = 0.7
CHECKPOINT_EVERY = 100
QUICK_QUESTIONS = 40
MAX_GRADIENT_NORM = 1.0

# Relative frequency of each task in the training data: harder tasks are sampled more often.
TASK_WEIGHTS = {
    **dict.fromkeys(TASKS, 1.0),
    "sum": 1.4,
    "difference": 1.4,
    "sort": 1.5,
    "spell": 1.2,
    "json": 1.2,
    "reverse": 0.8,
    "number_words": 0.7,
    "units": 0.8,
}

SHAPES = {
    "main": Shape(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_layers=5,
        num_heads=4,
        num_kv_heads=2,
    ),
    "draft": Shape(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=320,
        num_layers=3,
        num_heads=2,
        num_kv_heads=2,
    ),
}
PEAK_LEARNING_RATES = {"main": 3e-3, "draft": 4e-3}


@dataclass(kw_only=True)
class Progress:
    """The progress of a run: number of steps, their total time, and a running mean of the loss."""

    step: int = 0
    seconds: float = 0.0
    loss: float = 0.0

    def add(self, seconds: float, loss: float) -> None:
        """Record one step."""
        self.step += 1
        self.seconds += seconds
        self.loss = loss if self.step == 1 else 0.99 * self.loss + 0.01 * loss


@dataclass(frozen=True, kw_only=True)
class Run:
    """The objects of a training run. Training changes the network and the optimizers."""

    network: Llama
    forward: nn.Module
    optimizers: list[torch.optim.Optimizer]
    packers: tuple[Packer, Packer]
    schedule: Schedule
    out: Path

    def train_step(self, step: int) -> float:
        """Train on the batch of a step and return its loss."""
        batch = self.packers[step % LONG_EVERY == LONG_EVERY - 1].batch(step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.forward(batch.ids, batch.owners)
            loss = self.network.loss(hidden, batch.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), MAX_GRADIENT_NORM)
        apply_step(self.optimizers, self.schedule.learning_rate(step))
        return loss.item()

    def save(self, progress: Progress) -> None:
        """Write the checkpoint: all state that the next step depends on."""
        state = {
            "progress": asdict(progress),
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        torch.save(state, self.out / "checkpoint.part")
        (self.out / "checkpoint.part").replace(self.out / "checkpoint.pt")

    def restore(self) -> Progress:
        """Load the checkpoint if it exists. Return its progress."""
        path = self.out / "checkpoint.pt"
        if not path.exists():
            return Progress()
        state = torch.load(path, weights_only=True)
        self.network.load_state_dict(state["network"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return Progress(**state["progress"])


def log(out: Path, text: str) -> None:
    """Print a line and add it to the log file."""
    line = f"{time.strftime('%H:%M:%S', time.gmtime())} {text}"
    print(line, flush=True)
    with (out / "train.log").open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def record_command(args: argparse.Namespace) -> None:
    """Append the arguments that affect the weights to the commands that the model card shows.

    The same command again, which continues an interrupted run, is not appended.
    """
    stop = f" --stop-at {args.stop_at}" if args.stop_at else ""
    command = f"--size {args.size} --steps {args.steps}{stop}"
    path = args.out / "commands.txt"
    commands = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if commands[-1:] != [command]:
        path.write_text("\n".join([*commands, command, ""]), encoding="utf-8")


def build_run(args: argparse.Namespace, tokenizer: Tokenizer) -> Run:
    """Build the network, the data and the optimizers of a run."""
    torch.manual_seed(SEED)
    network = Llama(SHAPES[args.size])
    encoder = ConversationEncoder(tokenizer)
    packers = tuple(
        Packer(encoder=encoder, weights=TASK_WEIGHTS, seed=SEED, num_rows=rows, row_length=length)
        for rows, length in ((ROWS, ROW_LENGTH), (LONG_ROWS, LONG_ROW_LENGTH))
    )
    schedule = Schedule(
        peak=PEAK_LEARNING_RATES[args.size],
        warmup=WARMUP_STEPS,
        cooldown=int(args.steps * COOLDOWN_SHARE),
        total=args.steps,
    )
    return Run(
        network=network,
        forward=network if args.eager else torch.compile(network, dynamic=False),
        optimizers=build_optimizers(network),
        packers=packers,
        schedule=schedule,
        out=args.out,
    )


def measure_steps(args: argparse.Namespace, tokenizer: Tokenizer) -> int:
    """Return how many steps fit into `args.minutes`, estimated from a trial run of a few steps."""
    args.steps = 1000
    run = build_run(args, tokenizer)
    for step in range(LONG_EVERY):
        run.train_step(step)
    start = time.monotonic()
    for step in range(LONG_EVERY):
        run.train_step(step)
    return int(args.minutes * 60 / ((time.monotonic() - start) / LONG_EVERY))


def quick_check(run: Run, tokenizer: Tokenizer, step: int) -> None:
    """Log the accuracy on a few questions of each task."""
    export(run.network, tokenizer, run.out / "snapshot")
    folder = run.out / "snapshot"
    scores = evaluate(folder, QUICK_QUESTIONS) | evaluate_tools(folder, QUICK_QUESTIONS)
    rates = " ".join(f"{name} {result.accuracy:.2f}" for name, result in scores.items())
    log(run.out, f"step {step} {rates}")


def train(run: Run, tokenizer: Tokenizer, last: int, eval_every: int) -> Progress:
    """Train up to the step `last`, write checkpoints, and export the result."""
    progress = run.restore()
    while progress.step < last:
        start = time.monotonic()
        loss = run.train_step(progress.step)
        progress.add(time.monotonic() - start, loss)
        step, seconds = progress.step, progress.seconds
        if step % 100 == 0:
            log(run.out, f"step {step} loss {progress.loss:.4f} {seconds / 60:.1f} min")
        if step % CHECKPOINT_EVERY == 0 or step == last:
            run.save(progress)
        if eval_every and step % eval_every == 0:
            quick_check(run, tokenizer, step)
    export(run.network, tokenizer, run.out)
    return progress


def main() -> None:
    """Train, export, evaluate and write the model card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=sorted(SHAPES), default="main")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--minutes", type=float, help="take as many steps as fit instead")
    parser.add_argument("--stop-at", type=int, help="stop early, to continue with other --steps")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--eval-every", type=int, default=0, help="steps between quick checks")
    parser.add_argument("--main", type=Path, help="for a draft: the model to compare it with")
    parser.add_argument("--eager", action="store_true", help="do not compile the network")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(SEED)
    if args.minutes:
        args.steps = measure_steps(args, tokenizer)
    run = build_run(args, tokenizer)
    log(args.out, f"{args.size}: {sum(p.numel() for p in run.network.parameters())} parameters")
    last = args.stop_at or args.steps
    if run.restore().step < last:
        record_command(args)
    progress = train(run, tokenizer, last, args.eval_every)
    log(args.out, f"trained {progress.step} steps in {progress.seconds / 60:.1f} minutes")
    facts = RunFacts(
        size=args.size,
        commands=tuple((args.out / "commands.txt").read_text(encoding="utf-8").splitlines()),
        steps=progress.step,
        tokens=progress.step * ROWS * ROW_LENGTH,
        seconds=progress.seconds,
        threads=args.threads,
        final_loss=progress.loss,
        agreement=agreement(args.main, args.out, 40) if args.main else None,
    )
    write_card(args.out, facts, evaluate(args.out, 200), evaluate_tools(args.out, 200))


if __name__ == "__main__":
    main()
