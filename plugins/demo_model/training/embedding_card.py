"""Write the model card of the embedding model: description, training and accuracy.

Contract: every number comes from the saved files, from the data or from the arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from card import num_parameters

from dovetail_demo_model.sentences import (
    HELD_OUT_SHARE,
    INTENTS,
    NUM_HELD_OUT_WORDINGS,
    VALUES,
    held_out_pairs,
    meanings,
)

_SCRIPT = "python plugins/demo_model/training/train_embedding.py"
_CARD = """\
# Dovetail demo model (embedding)

A BERT encoder with {parameters:,} parameters, trained from scratch for this project, so that
embeddings can be tried without a download. Sentences that mean the same have similar embeddings,
also if they have few words in common:

    {first}
    {second}

| | |
|---|---|
| architecture | BertModel, {num_hidden_layers} layers, hidden size {hidden_size}, \
{num_attention_heads} heads, mean pooling, normalized |
| weights | float32, {megabytes:.2f} MB |
| dimensions | {sizes} (`matryoshka_dimensions`) |
| tokenizer | WordPiece in lower case, {vocab_size} tokens: the words of the data, and characters |
| context | {max_position_embeddings} positions |
| languages | English |
| license | Apache-2.0 |

## Accuracy

{num_pairs} held-out meanings have two sentences each (seed {seed}). A sentence counts as correct
only if its nearest neighbor among the other {num_others} sentences is the sentence of the same
meaning. The two sentences have different wordings and different forms of both values. Neither the
meanings nor the wordings are in the training data. The same network with its initial random weights
is the comparison.

| dimensions | accuracy | random weights |
|---|---|---|
{table}

## Data

`dovetail_demo_model.sentences` generates all data: {num_intents} intents, such as calling a person
or renting an item, each with two slots (person, item, time or place) and {num_wordings} wordings.
Each of the {num_values} values of the slots has two forms, such as "Paris" and "the capital of
France". A meaning is an intent with two values. A hash holds out one of {share} meanings from
training: {num_meanings} meanings are for training and {num_held_out} are held out. The last
{num_held_out_wordings} wordings of each intent are held out for all meanings. They contain only
words that occur in the wordings for training.

## Training

{num_steps:,} steps of {batch} pairs of sentences; the two sentences of a pair have the same meaning
and different wordings. In the contrastive loss (temperature 0.05), the other sentences of the batch
are the negatives; the loss is the mean over the sizes of the embedding. The final loss is
{final_loss:.4f}. Muon trains the matrices and AdamW the other parameters. The training took
{seconds:.0f} seconds of CPU time with one thread:

    {script} --out DIR --steps {num_steps}

## Limits

The model knows only the intents and values of its data. It reads other words letter by letter, and
their embeddings have no meaning. The model is made for tests.
"""


def write_card(
    folder: Path,
    *,
    accuracies: Mapping[int, float],
    untrained: Mapping[int, float],
    num_pairs: int,
    **facts: float,
) -> None:
    """Write MODEL_CARD.md into the directory of a saved model.

    accuracies, untrained: the accuracy for each size of the embedding, with the saved weights and
    with random weights. facts: seed, num_steps, batch, seconds, final_loss.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    first, second = held_out_pairs(1, 3)[0]
    text = _CARD.format(
        **{key: config[key] for key in config if type(config[key]) is int},
        **facts,
        first=first,
        second=second,
        parameters=num_parameters(folder),
        megabytes=(folder / "model.safetensors").stat().st_size / 1e6,
        sizes=", ".join(map(str, accuracies)),
        num_pairs=num_pairs,
        num_others=2 * num_pairs - 1,
        table="\n".join(
            f"| {size} | {accuracy:.1%} | {untrained[size]:.1%} |"
            for size, accuracy in accuracies.items()
        ),
        num_intents=len(INTENTS),
        num_wordings=len(INTENTS[0].wordings),
        num_values=sum(map(len, VALUES.values())),
        share=HELD_OUT_SHARE,
        num_meanings=len(meanings(held_out=False)),
        num_held_out=len(meanings(held_out=True)),
        num_held_out_wordings=NUM_HELD_OUT_WORDINGS,
        script=_SCRIPT,
    )
    (folder / "MODEL_CARD.md").write_text(text, encoding="utf-8")
