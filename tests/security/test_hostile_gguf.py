"""Damaged GGUF files cause typed errors that name the file, in limited time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from security.gguf_parts import ARRAY, STRING, U8
from security.hostile_gguf import TEMPLATE, damage, make_valid

from dovetail import LLM, SamplingParams
from dovetail.errors import DovetailError, ModelError
from dovetail_gguf import metadata
from dovetail_gguf.model_format import GGUFFormat
from dovetail_gguf.tokenizer import GGUFTokenizer

TESTS = Path(__file__).resolve().parents[1]
MAX_SECONDS = 10.0
MAX_GROWTH_MIB = 400
NUM_SHORT, NUM_ALL = 150, 2000
USER = {"role": "user", "content": "hello"}
OPTIONS = {
    "max_model_len": 32,
    "max_num_seqs": 2,
    "num_gpu_blocks_override": 8,
    "num_threads": 1,
    "use_tqdm_on_load": False,
    "platform": "cpu",
    "plugin_options": {"worker:cpu": {"packed_cache": "off"}},
}


def report_of(first, count, folder):
    command = (
        sys.executable,
        "-m",
        "security.hostile_gguf_runs",
        str(first),
        str(count),
        str(folder),
    )
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"the process ended with {done.returncode}: {done.stderr[-2000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def check(report, count):
    assert not report["broken"], "\n".join(report["broken"][:10])
    assert sum(report["outcomes"].values()) == count
    assert report["outcomes"]["ModelError"] > count / 3
    assert report["outcomes"]["WeightError"] and report["outcomes"]["RequestError"]
    assert report["slowest_s"] < MAX_SECONDS
    assert report["growth_mib"] < MAX_GROWTH_MIB


def test_damaged_files_give_typed_errors(tmp_path):
    check(report_of(0, NUM_SHORT, tmp_path), NUM_SHORT)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(8))
def test_2000_damaged_files_give_typed_errors(part, tmp_path):
    count = NUM_ALL // 8
    check(report_of(part * count, count, tmp_path), count)


def test_damaged_files_do_not_affect_other_engines(tmp_path):
    path = tmp_path / "valid.gguf"
    path.write_bytes(make_valid().to_bytes())
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    rejected = 0
    with LLM(str(path), **OPTIONS) as llm:
        (before,) = llm.generate("hello hello", params, use_tqdm=False)
        for number in range(12):
            damaged = tmp_path / f"damaged{number}.gguf"
            damaged.write_bytes(damage(number))
            try:
                LLM(str(damaged), **OPTIONS).shutdown()
            except DovetailError as error:
                rejected += 1
                assert damaged.name in str(error)
        (after,) = llm.generate("hello hello", params, use_tqdm=False)
    assert rejected > 6
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


@pytest.mark.parametrize(
    ("key", "count", "limit"),
    [
        ("tokens", (1 << 20) + 1, 1 << 20),
        pytest.param("merges", (1 << 21) + 1, 1 << 21, marks=pytest.mark.slow),
    ],
)
def test_a_list_beyond_its_limit_is_rejected_before_it_is_read(key, count, limit, tmp_path):
    parts, path = make_valid(), tmp_path / "long.gguf"
    parts.metadata[f"tokenizer.ggml.{key}"] = (ARRAY, (STRING, ["a"] * count))
    path.write_bytes(parts.to_bytes())
    start = time.monotonic()
    with pytest.raises(
        ModelError, match=rf"long\.gguf.*{key} has {count} values.*limits are {limit}"
    ):
        GGUFTokenizer.from_directory(path)
    assert time.monotonic() - start < MAX_SECONDS


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("llama.block_count", (ARRAY, (U8, bytes(9001))), "has 9001 values"),
        ("general.architecture", (STRING, "x" * 9001), "9001 bytes"),
        ("split.count", (ARRAY, (U8, bytes(9001))), "has 9001 values"),
    ],
)
def test_a_long_value_of_any_key_is_rejected_before_it_is_converted(
    key, value, words, tmp_path, monkeypatch
):
    """A byte of an array takes at least 8 bytes in a list."""
    monkeypatch.setattr(metadata, "MAX_READ_VALUES", 9000)
    monkeypatch.setattr(metadata, "MAX_READ_BYTES", 9000)
    parts, path = make_valid(), tmp_path / "long.gguf"
    parts.metadata[key] = value
    path.write_bytes(parts.to_bytes())
    with pytest.raises(ModelError, match=rf"long\.gguf: {key} .*{words}"):
        GGUFFormat().describe(path)


def test_a_long_value_of_an_unknown_key_has_no_effect(tmp_path):
    parts, path = make_valid(), tmp_path / "long.gguf"
    parts.metadata["unknown"] = (ARRAY, (U8, bytes((1 << 22) + 1)))
    parts.metadata["tokenizer.chat_template"] = (STRING, TEMPLATE + "{# long #}" * 1000)
    path.write_bytes(parts.to_bytes())
    assert GGUFFormat().describe(path).config["num_hidden_layers"] == 1
    assert len(GGUFTokenizer.from_directory(path).apply_chat_template([USER])) > 5


@pytest.mark.parametrize("name", ["x" * 501, "\x1b[2J", "a\nb"])
def test_a_tensor_with_a_long_or_unprintable_name_is_rejected(name, tmp_path):
    parts, path = make_valid(), tmp_path / "small.gguf"
    parts.tensors[3][0] = name
    path.write_bytes(parts.to_bytes())
    with pytest.raises(ModelError, match=r"a tensor has the name .* unprintable") as error:
        GGUFFormat().describe(path)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("distance", [0, 32])
def test_tensors_that_overlap_are_rejected(distance, tmp_path):
    """Otherwise a file of 1 GB may contain a model of 100 TB."""
    parts, path = make_valid(), tmp_path / "small.gguf"
    by_name = {tensor[0]: tensor for tensor in parts.tensors}
    by_name["blk.0.ffn_up.weight"][3] = by_name["blk.0.ffn_gate.weight"][3] + distance
    path.write_bytes(parts.to_bytes())
    expected = r"small\.gguf is damaged: the tensors 'blk.0.ffn_gate.weight' and .* overlap"
    with pytest.raises(ModelError, match=expected):
        LLM(str(path), **OPTIONS)
