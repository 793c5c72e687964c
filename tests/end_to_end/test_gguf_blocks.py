"""An engine computes with the quantized blocks of a GGUF file and caches the packed blocks."""

import logging

import gguf
import numpy as np
import pytest
from gguf.quants import quantize

from dovetail import LLM, SamplingParams

native_library = pytest.importorskip("dovetail_cpu.native_library")
pytestmark = pytest.mark.skipif(
    not native_library.probe_fast().usable, reason="there are no fast native kernels here"
)

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, VOCAB = 256, 4, 2, 512, 160
TYPES = {"attn_q": "Q8_0", "attn_k": "Q4_0", "attn_v": "Q5_1", "ffn_down": "Q6_K"}
"""Types of some tensors. All other matrices have the type Q4_1, and the norms F32."""


def blocks_of(kind, shape, chance):
    """Return the tensor's bytes: quantized normally distributed values, or random Q6_K codes."""
    weight = chance.standard_normal(shape).astype(np.float32) * 0.06
    if kind != gguf.GGMLQuantizationType.Q6_K:
        return quantize(weight, kind)
    blocks = chance.integers(0, 256, (shape[0], shape[1] // 256, 210), np.uint8)
    blocks[..., 192:208] = chance.integers(20, 60, (*blocks.shape[:2], 16))
    blocks[..., 208:] = np.array([5e-5], np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "blocks.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    numbers = {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": HIDDEN,
        "feed_forward_length": FEED_FORWARD,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": HIDDEN // HEADS,
    }
    for key, value in numbers.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    kv = KV_HEADS * HIDDEN // HEADS
    shapes = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.attn_norm": (HIDDEN,),
            f"blk.{layer}.ffn_norm": (HIDDEN,),
            f"blk.{layer}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k": (kv, HIDDEN),
            f"blk.{layer}.attn_v": (kv, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_up": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, FEED_FORWARD),
        }
    chance = np.random.default_rng(0)
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
            continue
        kind = gguf.GGMLQuantizationType[TYPES.get(name.rpartition(".")[2], "Q4_1")]
        writer.add_tensor(f"{name}.weight", blocks_of(kind, shape, chance), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def logprobs(path, **options):
    """Return the name of the linear method and the log-probabilities of a prompt's tokens."""
    llm = LLM(
        path,
        skip_tokenizer_init=True,
        num_threads=1,
        num_gpu_blocks_override=8,
        block_size=16,
        **options,
    )
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    prompt = [int(x) for x in np.random.default_rng(1).integers(3, VOCAB, 40)]
    (result,) = llm.generate([prompt], params, use_tqdm=False)
    actual = zip(prompt[1:], result.prompt_logprobs[1:], strict=True)
    return np.array([row[token].logprob for token, row in actual])


def test_products_with_quantized_blocks_agree_with_dequantized_weights(path, caplog):
    """The results differ from float32 only by the rounding of activations and of bfloat16."""
    with caplog.at_level(logging.INFO):
        actual = logprobs(path)
    assert "dequantized tensors: 1 of type Q4_1." in caplog.text  # the embedding table
    caplog.clear()
    with caplog.at_level(logging.INFO):
        exact = logprobs(path, dtype="float32", linear_method="torch")
    assert "2 of type Q6_K" in caplog.text
    assert np.abs(actual - exact).mean() < 0.05
    assert np.abs(exact - exact.mean()).mean() > 0.3  # the model is not uniform


def test_packed_blocks_are_cached_and_give_the_same_results(path, caplog, tmp_path):
    options = {
        "plugin_options": {
            "worker:cpu": {"packed_cache": str(tmp_path / "packed"), "packed_cache_min_mib": 0}
        }
    }
    first = logprobs(path, **options)
    with caplog.at_level(logging.INFO):
        second = logprobs(path, **options)
    assert "Mapped" in caplog.text
    assert np.array_equal(first, second)


def test_the_error_for_a_damaged_scale_names_the_weight(path, tmp_path):
    from dovetail.errors import WeightError

    file = gguf.GGUFReader(path)
    (tensor,) = [item for item in file.tensors if item.name == "blk.1.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    data[tensor.data_offset : tensor.data_offset + 2] = b"\x00\x7e"  # NaN
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data)
    with pytest.raises(WeightError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        logprobs(damaged)
