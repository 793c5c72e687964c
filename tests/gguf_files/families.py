"""Writes the checkpoints of families to GGUF files, by the rules of llama.cpp's converter.

Names of tensors come from the gguf package. Every rule below is a rule of the converter, which is
independent of the engine's reader.
Source: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES
from gguf.quants import dequantize, quantize

from gguf_files.conversion import Conversion, changed
from gguf_files.expert_families import EXPERT_CONVERSIONS
from gguf_files.expert_tensors import converted
from gguf_files.state_families import STATE_CONVERSIONS, converted_state
from gguf_files.vocabularies import finish
from parity.family_checkpoints import FAMILIES, usual_family

BLOCK = 32
"""Values of a block of the types in the tests."""
PATTERN = {"num_hidden_layers": 4}
"""Enough layers for a fixed pattern, because files do not list the type of each layer."""


_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping"}
_CAPS |= {"final_logit_softcapping": "final_logit_softcapping"}
_LONG = FAMILIES["phi3, long rope, short"].fields["rope_parameters"]
_SCALED = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
_GEMMA3 = usual_family(
    "Gemma3",
    config="Gemma3TextConfig",
    head_dim=20,
    sliding_window=37,
    query_pre_attn_scalar=20,
    num_hidden_layers=6,
    rope_parameters={
        "full_attention": _SCALED,
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
)
_SCALING = {"rope.scaling.type": "!linear", "rope.scaling.factor": 8.0}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_RESIDUAL = {"use_parallel_residual": "use_parallel_residual"}

CONVERSIONS: Mapping[str, Conversion] = {
    "gemma": Conversion(architecture=MODEL_ARCH.GEMMA, family=FAMILIES["gemma"], norm_offset=1.0),
    "gemma2": Conversion(
        architecture=MODEL_ARCH.GEMMA2,
        family=changed("gemma2", query_pre_attn_scalar=20),
        norm_offset=1.0,
        keys=_CAPS | _WINDOW,
    ),
    "gemma3": Conversion(
        architecture=MODEL_ARCH.GEMMA3,
        family=_GEMMA3,
        norm_offset=1.0,
        keys=_WINDOW | _SCALING | {"rope.freq_base": 1e6},
    ),
    "phi2": Conversion(architecture=MODEL_ARCH.PHI2, family=FAMILIES["phi"]),
    "phi3": Conversion(
        architecture=MODEL_ARCH.PHI3,
        family=changed("phi3, window", hidden_size=64, intermediate_size=96),
        keys=_WINDOW,
    ),
    "phi3, long rope": Conversion(
        architecture=MODEL_ARCH.PHI3,
        family=FAMILIES["phi3, long rope, short"],
        keys={"rope.scaling.original_context_length": 1024},
    ),
    "gpt2": Conversion(
        architecture=MODEL_ARCH.GPT2,
        family=FAMILIES["gpt2"],
        transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
    ),
    "gptneox": Conversion(
        architecture=MODEL_ARCH.GPTNEOX,
        family=changed("gpt_neox", intermediate_size=96),
        qkv="heads",
        keys=_RESIDUAL,
    ),
    "gptneox, sequential": Conversion(
        architecture=MODEL_ARCH.GPTNEOX,
        family=FAMILIES["gpt_neox, sequential"],
        qkv="heads",
        keys=_RESIDUAL,
    ),
    "starcoder2": Conversion(
        architecture=MODEL_ARCH.STARCODER2, family=changed("starcoder2", sliding_window=None)
    ),
    "stablelm": Conversion(architecture=MODEL_ARCH.STABLELM, family=FAMILIES["stablelm"]),
    "stablelm, parallel": Conversion(
        architecture=MODEL_ARCH.STABLELM,
        family=changed("stablelm", use_parallel_residual=True),
    ),
    "olmo": Conversion(
        architecture=MODEL_ARCH.OLMO,
        family=FAMILIES["olmo"],
        is_permuted=True,
        keys={"attention.clamp_kqv": "clip_qkv"},
    ),
    "olmo2": Conversion(architecture=MODEL_ARCH.OLMO2, family=FAMILIES["olmo2"]),
    "olmo3": Conversion(
        architecture=MODEL_ARCH.OLMO2,
        family=usual_family("Olmo3", sliding_window=37, **PATTERN),
        keys=_WINDOW,
    ),
    "granite": Conversion(
        architecture=MODEL_ARCH.GRANITE,
        family=FAMILIES["granite"],
        is_permuted=True,
        keys={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    "command-r": Conversion(
        architecture=MODEL_ARCH.COMMAND_R,
        family=FAMILIES["cohere, qk norm"],
        keys={"logit_scale": "logit_scale", "rope.scaling.type": "!none"},
    ),
    "cohere2": Conversion(
        architecture=MODEL_ARCH.COHERE2,
        family=usual_family("Cohere2", logit_scale=0.7, sliding_window=37, **PATTERN),
        keys=_WINDOW | {"logit_scale": "logit_scale", "rope.scaling.type": "!none"},
    ),
    "chatglm": Conversion(architecture=MODEL_ARCH.CHATGLM, family=FAMILIES["glm"]),
    "glm4": Conversion(architecture=MODEL_ARCH.GLM4, family=FAMILIES["glm4"]),
    "smollm3": Conversion(
        architecture=MODEL_ARCH.SMOLLM3,
        family=usual_family("SmolLM3", **PATTERN),
        is_permuted=True,
    ),
    "falcon, 7b": Conversion(
        architecture=MODEL_ARCH.FALCON, family=FAMILIES["falcon, 7b"], qkv="groups"
    ),
    "falcon, 40b": Conversion(
        architecture=MODEL_ARCH.FALCON, family=FAMILIES["falcon, 40b"], qkv="groups"
    ),
    "bloom": Conversion(architecture=MODEL_ARCH.BLOOM, family=FAMILIES["bloom"], qkv="heads"),
    "mpt": Conversion(
        architecture=MODEL_ARCH.MPT,
        family=FAMILIES["mpt"],
        keys={"attention.clamp_kqv": 1.5, "attention.max_alibi_bias": 8.0},
    ),
    **EXPERT_CONVERSIONS,
    **STATE_CONVERSIONS,
}


def write_family(
    conversion: Conversion,
    model: torch.nn.Module,
    path: Path,
    type_: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a transformers model to the GGUF file `path`. type_: the type of matrices.

    The matrices of `model` are rounded to this type, so that it stays the reference. Matrices with
    rows that are not whole blocks have the type F32. extra: more tensors, by their names in the
    file.
    """
    config = model.config
    name = MODEL_ARCH_NAMES[conversion.architecture]
    writer = GGUFWriter(path, name)
    for key, value in (_usual_keys(config) | dict(conversion.keys)).items():
        if isinstance(value, str):
            value = value[1:] if value.startswith("!") else getattr(config, value)
        if value is not None:
            _add(writer, f"{name}.{key}", value)
    names = get_tensor_name_map(conversion.architecture, config.num_hidden_layers)
    tensors = _tensors(conversion, model, type_)
    for own, tensor in tensors.items():
        own = own.removeprefix("transformer.") if name == "bloom" else own
        stored = names.get_name(own, try_suffixes=(".weight", ".bias"))
        assert stored is not None, own
        kind = type_ if is_rounded(own, tensor.shape) else GGMLQuantizationType.F32
        writer.add_tensor(stored, quantize(tensor, kind), raw_dtype=kind)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(config, rope))
    for kind in ("long", "short"):
        if f"{kind}_factor" in rope:
            factors = np.array(rope[f"{kind}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    for own, tensor in (extra or {}).items():
        writer.add_tensor(own, tensor)
    finish(writer)
    return path


def _llama3_divisors(config: Any, rope: Mapping[str, float]) -> np.ndarray:
    """Return the divisors of the frequencies, where low_freq_factor equals high_freq_factor."""
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    lengths = 2 * np.pi * rope["rope_theta"] ** exponents
    is_short = lengths < rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    return np.where(is_short, 1.0, rope["factor"]).astype(np.float32)


def _usual_keys(config: Any) -> dict[str, Any]:
    """Return the metadata that all families have."""
    heads = getattr(config, "num_attention_heads", 0)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    inner = next(
        (
            value
            for name in ("intermediate_size", "ffn_hidden_size", "n_inner")
            if (value := getattr(config, name, None))
        ),
        4 * config.hidden_size,
    )
    eps_names = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    eps = next((value for n in eps_names if (value := getattr(config, n, None))), 1e-5)
    lengths = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    keys = {
        "context_length": next((v for n in lengths if (v := getattr(config, n, None))), 2048),
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": _num_kv_heads(config),
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": int(size * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
    }
    if hasattr(config, "rms_norm_eps"):
        return keys | {"attention.layer_norm_rms_epsilon": config.rms_norm_eps}
    return keys | {"attention.layer_norm_epsilon": eps}


def _num_kv_heads(config: Any) -> int:
    if config.model_type == "falcon":
        return config.num_kv_heads if config.new_decoder_architecture else 1
    heads = getattr(config, "num_attention_heads", 0)
    return getattr(config, "num_key_value_heads", None) or heads


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    kinds[str] = writer.add_string
    kinds[type(value)](key, value)


def _tensors(
    conversion: Conversion, model: torch.nn.Module, type_: GGMLQuantizationType
) -> dict[str, np.ndarray]:
    """Return the tensors by the checkpoint's names, in the layout of the file."""
    config = model.config
    tensors: dict[str, np.ndarray] = {}
    parameters = dict(model.named_parameters())  # without a tied head
    parameters |= {
        name: buffer
        for name, buffer in model.named_buffers()
        if name.endswith("e_score_correction_bias")
    }
    for name, parameter in parameters.items():
        if type_ != GGMLQuantizationType.F32 and name.endswith("in_proj_qkvz.weight"):
            _round(parameter.detach(), type_)  # its tensors are copies
    pieces = {
        own: piece
        for name, parameter in parameters.items()
        for state_name, state in converted_state(config, name, parameter.detach()).items()
        for own, piece in converted(conversion, config, state_name, state).items()
    }
    for name, parameter in pieces.items():
        if type_ != GGMLQuantizationType.F32 and is_rounded(name, parameter.shape):
            _round(parameter, type_)
        values = parameter.float().numpy()
        if name.endswith(conversion.transposed):
            values = values.T
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            values = values + np.float32(conversion.norm_offset)
        if (match := re.search(r"\.([qk])_proj\.", name)) and conversion.is_permuted:
            heads = config.num_attention_heads
            values = _permuted(values, heads if match[1] == "q" else _num_kv_heads(config))
        if "query_key_value" in name and conversion.qkv:
            values = _separated(values, config, conversion.qkv)
        tensors[name] = np.ascontiguousarray(values)
    return tensors


def is_rounded(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor has the type of matrices. name: in the checkpoint.

    The converter never rounds norms, biases and routers.
    """
    is_matrix = name.endswith(".weight") and len(shape) > 1 and shape[-1] % BLOCK == 0
    kept = r"norm|mlp\.gate\.|router|shared_expert_gate|conv1d|\.D$|A_log"
    return is_matrix and not re.search(kept, name)


@torch.no_grad()
def _round(parameter: torch.Tensor, type_: GGMLQuantizationType) -> None:
    values = dequantize(quantize(parameter.numpy(), type_), type_)
    parameter.copy_(torch.from_numpy(values))


def _permuted(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Return the rows with the first and the second half of each head in turn."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _separated(values: np.ndarray, config: Any, order: str) -> np.ndarray:
    """Return all rows of q, then those of k and of v."""
    rest = values.shape[1:]
    groups = config.num_attention_heads if order == "heads" else _num_kv_heads(config)
    per_group = config.num_attention_heads // groups
    size = config.hidden_size // config.num_attention_heads
    by_group = values.reshape(groups, per_group + 2, size, *rest)
    parts = (by_group[:, :per_group], by_group[:, per_group], by_group[:, per_group + 1])
    return np.concatenate([part.reshape(-1, *rest) for part in parts])
