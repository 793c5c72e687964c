"""Train the embedding model from scratch: data, tokenizer, network, card.

Contract: the same arguments give the same data, order and schedule; the weights differ between
machines only by rounding. The result is a sentence-transformers directory in --out, with the
accuracy of the saved files in its model card. The training takes a few minutes on one CPU core.
Method: contrastive learning with in-batch negatives (van den Oord et al. 2018, arXiv:1807.03748),
at several sizes of the embedding (Kusupati et al. 2022, arXiv:2205.13147).

Usage: python plugins/demo_model/training/train_embedding.py --out DIR [--steps N]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from embedding_card import write_card
from optimizer import Schedule, apply_step, build_optimizers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoTokenizer, BertConfig, BertModel

from dovetail_demo_model.sentences import (
    INTENTS,
    NUM_HELD_OUT_WORDINGS,
    VALUES,
    draw_pair,
    held_out_pairs,
    meanings,
    pair_accuracy,
)

SEED = 2026
HIDDEN_SIZE, NUM_LAYERS, NUM_HEADS, INTERMEDIATE_SIZE = 64, 3, 2, 256
MAX_POSITIONS = 64
DIMENSIONS = (16, 32, 64)
"""The sizes of an embedding (Matryoshka): each smaller one is a prefix of the larger ones."""
PAIRS = 128
TEMPERATURE = 0.05
PEAK_LEARNING_RATE = 4e-3
WARMUP_STEPS = 50
COOLDOWN_SHARE = 0.7
MAX_GRADIENT_NORM = 1.0
NUM_HELD_OUT = 400

PAD, UNKNOWN, CLS, SEP = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
SPECIAL_TOKENS = (PAD, UNKNOWN, CLS, SEP)
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,;:!?'\"()-+*/%&$"


def build_tokenizer() -> Tokenizer:
    """Build the tokenizer: the words of the training sentences in lower case, and characters."""
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    normalizer = normalizers.BertNormalizer(lowercase=True)
    empty = dict.fromkeys(VALUES, "")
    wordings = [w for intent in INTENTS for w in intent.wordings[:-NUM_HELD_OUT_WORDINGS]]
    texts = [wording.format_map(empty) for wording in wordings]
    texts += [form for values in VALUES.values() for value in values for form in value]
    words = {
        word
        for text in texts
        for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text))
    }
    pieces = [*CHARACTERS, *(f"##{character}" for character in CHARACTERS)]
    names = [*SPECIAL_TOKENS, *pieces, *sorted(words - set(CHARACTERS))]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(token, vocabulary[token]) for token in (CLS, SEP)],
    )
    return tokenizer


def build_network(vocab_size: int) -> BertModel:
    """Build the network with random weights. The same torch seed gives the same weights."""
    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        intermediate_size=INTERMEDIATE_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        type_vocab_size=1,
        pad_token_id=0,
        matryoshka_dimensions=list(DIMENSIONS),
    )
    return BertModel(config, add_pooling_layer=False)


def embed(network: nn.Module, tokenizer: Tokenizer, sentences: Sequence[str]) -> Tensor:
    """Return the mean of each sentence's hidden states, [N, D], not normalized."""
    tokenizer.enable_padding(pad_id=0, pad_token=PAD)
    encodings = tokenizer.encode_batch(list(sentences))
    tokenizer.no_padding()
    ids_NL = torch.tensor([encoding.ids for encoding in encodings])
    mask_NL = torch.tensor([encoding.attention_mask for encoding in encodings])
    hidden_NLD = network(input_ids=ids_NL, attention_mask=mask_NL).last_hidden_state
    weights_NL1 = mask_NL[..., None].to(hidden_NLD.dtype)
    return (hidden_NLD * weights_NL1).sum(1) / weights_NL1.sum(1)


def contrastive_loss(first_ND: Tensor, second_ND: Tensor) -> Tensor:
    """Return the InfoNCE loss of pairs in both directions, averaged over the embedding sizes."""
    targets_N = torch.arange(len(first_ND))
    total = torch.zeros(())
    for size in DIMENSIONS:
        first = functional.normalize(first_ND[:, :size], dim=-1)
        second = functional.normalize(second_ND[:, :size], dim=-1)
        scores_NN = first @ second.T / TEMPERATURE
        total = total + functional.cross_entropy(scores_NN, targets_N)
        total = total + functional.cross_entropy(scores_NN.T, targets_N)
    return total / (2 * len(DIMENSIONS))


def train(network: BertModel, tokenizer: Tokenizer, num_steps: int) -> float:
    """Train the network and return a running mean of the loss."""
    rng = Random(f"batches:{SEED}")
    selection = meanings(held_out=False)
    cooldown = int(num_steps * COOLDOWN_SHARE)
    schedule = Schedule(
        peak=PEAK_LEARNING_RATE, warmup=WARMUP_STEPS, cooldown=cooldown, total=num_steps
    )
    optimizers = build_optimizers(network)
    mean = 0.0
    network.train()
    for step in range(num_steps):
        batch = rng.sample(selection, PAIRS)
        pairs = [draw_pair(rng, meaning, held_out=False) for meaning in batch]
        first, second = zip(*pairs, strict=True)
        first_ND, second_ND = embed(network, tokenizer, first + second).chunk(2)
        loss = contrastive_loss(first_ND, second_ND)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), MAX_GRADIENT_NORM)
        apply_step(optimizers, schedule.learning_rate(step))
        mean = loss.item() if step == 0 else 0.98 * mean + 0.02 * loss.item()
        if step % 100 == 99:
            print(f"step {step + 1} loss {mean:.4f}", flush=True)
    network.eval()
    return mean


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def export(network: BertModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a sentence-transformers directory, in float32."""
    network.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": PAD, "unk_token": UNKNOWN, "cls_token": CLS, "sep_token": SEP}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_POSITIONS}
    _write_json(folder / "tokenizer_config.json", {**settings, **names})
    module = "sentence_transformers.models"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{module}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{module}.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{module}.Normalize"},
    ]
    _write_json(folder / "modules.json", modules)
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": HIDDEN_SIZE, "pooling_mode_mean_tokens": True}
    _write_json(folder / "1_Pooling" / "config.json", pooling)
    length = {"max_seq_length": MAX_POSITIONS, "do_lower_case": False}
    _write_json(folder / "sentence_bert_config.json", length)


def evaluate(network: nn.Module, tokenizer: Tokenizer) -> dict[int, float]:
    """Return the accuracy on held-out sentences for each size of the embedding."""
    sentences = [text for pair in held_out_pairs(NUM_HELD_OUT, SEED) for text in pair]
    with torch.inference_mode():
        vectors_ND = embed(network, tokenizer, sentences)
    return {
        size: pair_accuracy(functional.normalize(vectors_ND[:, :size], dim=-1).tolist())
        for size in DIMENSIONS
    }


def main() -> None:
    """Train, export, evaluate and write the model card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    tokenizer = build_tokenizer()
    network = build_network(tokenizer.get_vocab_size())
    network.eval()
    untrained = evaluate(network, tokenizer)
    start = time.process_time()
    loss = train(network, tokenizer, args.steps)
    seconds = time.process_time() - start
    export(network, tokenizer, args.out)
    saved = BertModel.from_pretrained(args.out, add_pooling_layer=False).eval()
    backend = AutoTokenizer.from_pretrained(args.out).backend_tokenizer
    write_card(
        args.out,
        accuracies=evaluate(saved, backend),
        untrained=untrained,
        num_pairs=NUM_HELD_OUT,
        seed=SEED,
        num_steps=args.steps,
        batch=PAIRS,
        seconds=seconds,
        final_loss=loss,
    )


if __name__ == "__main__":
    main()
