"""A published GGUF file in an engine: chat, command line, a file in several parts, exact logits."""

from __future__ import annotations

import io
import re

import pytest
import torch
from assets import fetch
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize
from transformers import LlamaConfig, LlamaForCausalLM

from dovetail import LLM, SamplingParams
from dovetail.cli import main
from dovetail.errors import ModelError
from dovetail_gguf.tensor_names import to_model_name

QUESTION = "Name the capital of France."
OPTIONS = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 40,
    "num_threads": 1,
    "use_tqdm_on_load": False,
    "platform": "cpu",
    "plugin_options": {"worker:cpu": {"packed_cache": "off"}},
}
GREEDY = SamplingParams(temperature=0, max_tokens=16)
TEXT = "The Eiffel Tower is in Paris. Water boils at 100 degrees Celsius, and def f(x): return x"
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def file():
    (actual,) = fetch("smollm2").iterdir()
    return actual


def ask(model):
    with LLM(str(model), **OPTIONS) as llm:
        (output,) = llm.chat([{"role": "user", "content": QUESTION}], GREEDY, use_tqdm=False)
    return output.outputs[0]


@pytest.fixture(scope="module")
def answer(file):
    return ask(file)


def test_a_model_in_a_gguf_file_answers_a_question(answer):
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"  # the model ends its output


def test_the_command_line_serves_a_directory_with_only_a_gguf_file(file, tmp_path, capsys):
    (tmp_path / file.name).symlink_to(file)
    options = ("--model", str(tmp_path), "--max-model-len", "256", "--temperature", "0")
    assert main(["generate", *options, "--chat", "--max-tokens", "16", QUESTION]) == 0
    assert "Paris" in capsys.readouterr().out


@pytest.mark.slow
def test_the_chat_command_serves_a_gguf_file(file, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION}\n"))
    options = ("--model", str(file), "--max-model-len", "256", "--temperature", "0")
    assert main(["chat", *options]) == 0
    assert "Paris" in capsys.readouterr().out


@pytest.mark.slow
def test_a_gguf_model_that_is_split_into_several_files_gives_the_same_output(
    file, answer, tmp_path
):
    first, *others = write_split(file, tmp_path / "model.gguf")
    assert others and first.name.endswith(f"-00001-of-{len(others) + 1:05}.gguf")
    assert ask(first).token_ids == answer.token_ids
    assert ask(tmp_path).token_ids == answer.token_ids
    with pytest.raises(ModelError, match=re.escape(first.name)):
        LLM(str(others[0]), **OPTIONS)
    others[-1].unlink()
    with pytest.raises(ModelError, match=re.escape(others[-1].name)):
        LLM(str(first), **OPTIONS)


def write_split(file, path):
    """Write the model in `file` again in parts of at most 40 MB. Return their paths."""
    reader = GGUFReader(file)
    writer = GGUFWriter(path, "llama", split_max_size=40_000_000)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind, *inner = field.types
        writer.add_key_value(field.name, field.contents(), kind, *inner[:1])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.iterdir())


def test_float32_logits_equal_those_of_transformers_on_dequantized_weights(file):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5)
    with LLM(str(file), dtype="float32", **OPTIONS) as llm:
        (output,) = llm.generate(TEXT, params, use_tqdm=False)
    ids = output.prompt_token_ids
    with torch.no_grad():
        logits_TV = reference(file)(torch.tensor([ids])).logits[0]
    expected_TV = logits_TV.log_softmax(-1)
    for index, actual in enumerate(output.prompt_logprobs[1:]):
        best = expected_TV[index].topk(5).indices.tolist()
        margins = expected_TV[index].topk(6).values.diff().abs()
        if margins.min() > TOLERANCE:
            assert set(best) <= set(actual)
        for token, item in actual.items():
            assert abs(item.logprob - float(expected_TV[index, token])) < TOLERANCE


def reference(file):
    """Return a transformers model with the dequantized weights of SmolLM2's file."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    weights = {}
    for tensor in GGUFReader(file).tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        name = to_model_name(tensor.name)
        heads = {"q_proj": 9, "k_proj": 3}.get(name.split(".")[-2])
        if heads:  # in the file, the halves of each head alternate
            rows = values.view(heads, values.shape[0] // heads // 2, 2, -1)
            values = rows.transpose(1, 2).reshape(values.shape)
        weights[name] = values
    model = LlamaForCausalLM(config)
    missing = model.load_state_dict(weights, strict=False)
    assert missing.missing_keys == ["lm_head.weight"] and not missing.unexpected_keys
    model.tie_weights()
    return model.eval()
