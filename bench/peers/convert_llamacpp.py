"""Write a checkpoint as GGUF files for llama.cpp: bf16, int8 (Q8_0) and int4 (Q4_0).

    PEER_PYTHON bench/peers/convert_llamacpp.py MODEL_DIR OUT_PREFIX

creates OUT_PREFIX-bf16.gguf and two quantized copies with llama.cpp's own quantizer. Llama, Qwen3
and Qwen3-MoE checkpoints in bfloat16 only. No tokenizer is included, because the benchmarks send
token ids. The script needs `gguf`, `numpy` and `llama-cpp-python`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp.llama_cpp as native
import numpy

QUANTIZED = {"int8": native.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": native.LLAMA_FTYPE_MOSTLY_Q4_0}
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}


def write_gguf(model: Path, out: Path) -> None:
    """Write the checkpoint as a GGUF file, with matrices in bfloat16 and vectors in float32."""
    config = json.loads((model / "config.json").read_text("utf-8"))
    kind = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[kind])
    _add_sizes(writer, config)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    for path in sorted(model.glob("*.safetensors")):
        for name, bits in _stacked(_tensors(path), config.get("num_experts", 0)):
            target = names.get_name(name, try_suffixes=(".weight",))
            if target is None:
                raise ValueError(f"llama.cpp has no tensor for the weight {name}")
            _add_tensor(writer, target, _in_their_order(name, bits, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, out: Path, kind: int) -> None:
    """Write a copy of a GGUF file whose tensors have the type `kind`.

    kind: a `llama_ftype` of llama.cpp. Tensors that are already quantized are requantized.
    """
    params = native.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = kind, True
    code = native.llama_model_quantize(str(source).encode(), str(out).encode(), params)
    if code:
        raise RuntimeError(f"llama.cpp could not quantize {source}: code {code}")


def _add_sizes(writer: Any, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    if num_experts := config.get("num_experts"):
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")


def _tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and the bits of each bfloat16 tensor as uint16."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = numpy.memmap(path, numpy.uint8, "r", offset=8 + size)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} is {entry['dtype']}; only bfloat16 checkpoints are converted")
        begin, end = entry["data_offsets"]
        yield name, data[begin:end].view(numpy.uint16).reshape(entry["shape"])


def _stacked(tensors: Iterable[tuple[str, Any]], num_experts: int) -> Iterator[tuple[str, Any]]:
    """Yield the weights of a layer's experts as one tensor [E, …], and other weights as they are.

    llama.cpp's table contains the name of an expert's weight without the number of the expert.
    """
    experts: dict[str, dict[int, Any]] = {}
    for name, bits in tensors:
        before, result, after = name.partition(".experts.")
        if not result:
            yield name, bits
            continue
        number, part = after.split(".", 1)
        stack = experts.setdefault(f"{before}{result}{part}", {})
        stack[int(number)] = bits
        if len(stack) == num_experts:
            yield f"{before}{result}{part}", numpy.stack([stack[i] for i in range(num_experts)])
            stack.clear()


def _in_their_order(name: str, bits: Any, config: dict[str, Any]) -> Any:
    """Return q and k of a Llama in llama.cpp's order: the rows of a rotation are adjacent."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    part = name.split(".")[-2]
    if config["model_type"] != "llama" or part not in heads:
        return bits
    rows, columns = bits.shape
    halves = bits.reshape(config[heads[part]], 2, -1, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _add_tensor(writer: Any, name: str, bits: Any) -> None:
    if bits.ndim == 1:
        writer.add_tensor(name, (bits.astype(numpy.uint32) << 16).view(numpy.float32))
        return
    raw = numpy.ascontiguousarray(bits).view(numpy.uint8)
    writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def main() -> int:
    """Convert the checkpoint given on the command line."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    model, prefix = Path(sys.argv[1]), sys.argv[2]
    plain = Path(f"{prefix}-bf16.gguf")
    write_gguf(model, plain)
    for weights, kind in QUANTIZED.items():
        quantize(plain, Path(f"{prefix}-{weights}.gguf"), kind)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
