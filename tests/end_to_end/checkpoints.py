"""Create checkpoints for tests: a small random model and a byte-level tokenizer."""

from __future__ import annotations

import json
import string
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
TEXTS = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "Sphinx of black quartz, judge my vow! How vexingly quick daft zebras jump? " * 3,
    "Paged attention keeps keys and values in blocks; a scheduler gives them out. " * 3,
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OPTIONS = {
    "num_threads": 1,
    "kv_cache_memory_bytes": 4 << 20,
    "block_size": 4,
    "max_num_seqs": 16,
    "use_tqdm_on_load": False,
}
"""Engine options that suit the small models of these tests."""
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def make_tokenizer(folder: Path) -> int:
    """Write tokenizer.json and its config. Return the vocabulary size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab_size()


def make_checkpoint(folder: Path, family: str = "Llama", seed: int = 3, **sizes: object) -> Path:
    """Write a random model of `family`.

    Its weights are large, so that outputs for different prompts differ."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = make_tokenizer(folder)
    config_cls = getattr(transformers, f"{family}Config")
    model_cls = getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(seed)
    model = model_cls(config_cls(vocab_size=vocab_size, **(SIZES | sizes)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.25)
    model.save_pretrained(folder)
    return folder


def letters(tokenizer: object) -> list[int]:
    """Return the ids of tokens that consist of letters, so that random outputs are readable."""
    texts = ((token, tokenizer.decode([token])) for token in range(tokenizer.vocab_size))
    expected = set(string.ascii_letters + " ")
    return [token for token, text in texts if text and set(text) <= expected]
