"""Creates a small Llama checkpoint with random weights and a vocabulary of words.

For demonstrations without a trained model: it loads and runs like any other model, but its output
has no meaning. This module needs `tokenizers`, but no tensor library, because the safetensors
format is a JSON header and raw numbers.
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

HIDDEN_SIZE = 64
INTERMEDIATE_SIZE = 192
NUM_LAYERS = 2
NUM_HEADS = 4
NUM_KV_HEADS = 2
MAX_LENGTH = 512

_SPECIAL = ("<unk>", "<eos>", "<user>", "<model>")
# fmt: off
_WORDS = (
    "a about above after again air all always and animal answer any are as ask at back be because "
    "bird blue boat book box bread bridge bring but by call can carry child city clear cloud come "
    "cook count cut day deep do door down draw dry each earth eat edge egg end even every eye far "
    "fast field find fire first fish five fly follow food foot for found four free from full game "
    "garden give glass go gold good grass great green ground grow hand has head hear heart help "
    "her here hill him his hold home horse hot house how if in iron is island it joint keep key "
    "kind king know lake land last late leaf learn left letter light like line list live long look "
    "made make many map mark may measure metal milk moon more most mountain move much music name "
    "near new next night no north not now number of off oil old on one only open or other our out "
    "over own page paper part past people place plant play point put question quick quiet rain "
    "read red rest river road rock room round run sail salt same sand say sea second see seed "
    "seven she ship short show side silver sing six sky sleep slow small snow so some song sound "
    "south spring star start step still stone story street strong summer sun table take talk tell "
    "ten that the their them then there these they thing think this those three through time to "
    "together tool town tree true turn two under until up us use very voice walk wall warm was "
    "water wave way we well west what wheel when where which white who why will wind window winter "
    "wise with wood word work world write year yellow yes you young"
)
# fmt: on
_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<user> ' if message['role'] == 'user' else '<model> ' }}{{ message['content'] }} "
    "{% endfor %}<model>"
)


def write_random_checkpoint(directory: Path, *, seed: int = 0) -> Path:
    """Write a float32 checkpoint of about 0.8 MB into `directory` and return the directory.

    Creates the directory if it does not exist. Equal seeds give equal bytes. Raises OSError if a
    file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = [*_SPECIAL, *_WORDS.split()]
    _write_json(directory / "config.json", _config(len(vocabulary)))
    _write_json(directory / "generation_config.json", {"eos_token_id": 1, "temperature": 0.0})
    _write_json(
        directory / "tokenizer_config.json",
        {"unk_token": "<unk>", "eos_token": "<eos>", "chat_template": _TEMPLATE},
    )
    _write_tokenizer(directory / "tokenizer.json", vocabulary)
    _write_weights(directory / "model.safetensors", _shapes(len(vocabulary)), seed)
    return directory


def _config(vocab_size: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HIDDEN_SIZE // NUM_HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    }


def _shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of the checkpoint, by its name."""
    hidden, inner = HIDDEN_SIZE, INTERMEDIATE_SIZE
    kv_size = hidden // NUM_HEADS * NUM_KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab_size, hidden),
    }
    for layer in range(NUM_LAYERS):
        of_layer = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv_size, hidden),
            "self_attn.v_proj": (kv_size, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes


def _write_weights(file: Path, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    source = random.Random(seed)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    pieces: list[bytes] = []
    end = 0
    for name, shape in shapes.items():
        is_norm = len(shape) == 1
        piece = struct.pack("<f", 1.0) * shape[0] if is_norm else _matrix(source, *shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + len(piece)]}
        pieces.append(piece)
        end += len(piece)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(pieces))


def _matrix(source: random.Random, num_rows: int, num_columns: int) -> bytes:
    """Return random float32 weights that roughly preserve the magnitude of their inputs."""
    bound = (3.0 / num_columns) ** 0.5
    count = num_rows * num_columns
    return struct.pack(f"<{count}f", *(source.uniform(-bound, bound) for _ in range(count)))


def _write_tokenizer(file: Path, vocabulary: list[str]) -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    numbers = {word: number for number, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(vocab=numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    tokenizer.save(str(file))


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
