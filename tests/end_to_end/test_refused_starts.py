"""Damaged files and contradictory settings quickly raise an error that names them.

`test_bad_start.py` tests the general rules.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from typing import Any

import pytest

from dovetail import LLM, SamplingParams
from dovetail.errors import (
    CapacityError,
    ConfigError,
    ContractError,
    DovetailError,
    ModelError,
    PluginNotFoundError,
    WeightError,
)
from dovetail_sched_fcfs import FCFSScheduler
from end_to_end.checkpoints import OPTIONS
from end_to_end.damage import (
    Damage,
    changed_weight,
    config_fields,
    content,
    fewer_ids,
    flipped_bit,
    header_entry,
    intact,
    pipe,
    renamed,
)

pytestmark = pytest.mark.timeout(30, func_only=True)

GATE = "model.layers.1.mlp.gate_proj.weight"
WEIGHTS = "model.safetensors"
HUGE = 10**9


class OldContract(FCFSScheduler):
    CONTRACT_VERSION = "99.0"


@dataclass(frozen=True)
class Case:
    """One case: a damaged file or an option, the expected error, and words in its message."""

    damage: Damage
    error: type[DovetailError]
    words: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)


def damaged(damage: Damage, error: type[DovetailError], *words: str, **options: Any) -> Case:
    return Case(damage, error, words, options)


def setting(error: type[DovetailError], *words: str, **options: Any) -> Case:
    return Case(intact, error, words, options)


def nan(weight):
    weight[3, 4] = math.nan
    return weight


def nested_index(folder):
    (folder / WEIGHTS).unlink()
    (folder / f"{WEIGHTS}.index.json").write_text('{"weight_map": ' + "[" * 1_000_000)


def long_header(folder):
    with (folder / WEIGHTS).open("r+b") as file:
        file.write((80 << 20).to_bytes(8, "little"))
        file.truncate(200 << 20)


FILES = {
    "config.json is not text": damaged(
        content("config.json", b"\xff\xfe\x00{"), ModelError, "config.json", "not valid JSON"
    ),
    "config.json is nested too deeply": damaged(
        content("config.json", "[" * 100_000), ModelError, "config.json"
    ),
    "config.json is a pipe": damaged(pipe("config.json"), ModelError, "config.json"),
    "a huge number of layers": damaged(
        config_fields(num_hidden_layers=HUGE), ModelError, "num_hidden_layers"
    ),
    "a huge hidden size": damaged(
        config_fields(hidden_size=HUGE), CapacityError, "memory for the model"
    ),
    "a negative vocabulary": damaged(config_fields(vocab_size=-1), ModelError, "vocab_size"),
    "an odd head size": damaged(config_fields(head_dim=7), ModelError, "head_dim"),
    "an unknown dtype": damaged(config_fields(dtype="int7"), ConfigError, "int7", "dtype"),
    "a negative rope theta": damaged(
        config_fields(rope_parameters={"rope_type": "default", "rope_theta": -1}),
        ModelError,
        "rope_theta",
    ),
    "code in the model directory, not trusted": damaged(
        config_fields(architectures=["OwnModel"], auto_map={"AutoModel": "own.OwnModel"}),
        PluginNotFoundError,
        "OwnModel",
    ),
    "generation_config.json is broken": damaged(
        content("generation_config.json", "{"), ModelError, "generation_config.json"
    ),
    "an invalid default": damaged(
        content("generation_config.json", '{"temperature": -3}'), ModelError, "temperature"
    ),
    "the header's length is wrong": damaged(flipped_bit(0, 0), WeightError, WEIGHTS),
    "the header's length is huge": damaged(flipped_bit(6, 7), WeightError, WEIGHTS),
    "a bit of the header is flipped": damaged(flipped_bit(60), WeightError, WEIGHTS),
    "a weight beyond the end of the file": damaged(
        header_entry(GATE, data_offsets=[0, HUGE]), WeightError, WEIGHTS, GATE
    ),
    "a weight of an unknown dtype": damaged(
        header_entry(GATE, dtype="F99"), WeightError, WEIGHTS, "F99"
    ),
    "a weight of a huge shape": damaged(
        header_entry(GATE, shape=[2**40, 2**40]), WeightError, WEIGHTS
    ),
    "weights of an integer dtype": damaged(
        changed_weight(GATE, lambda weight: weight.long()), WeightError, GATE, "I64"
    ),
    "NaN in a weight": damaged(changed_weight(GATE, nan), WeightError, GATE, "NaN"),
    "values outside of the dtype's range": damaged(
        changed_weight(GATE, lambda weight: weight.double() * 1e300), WeightError, GATE, "dtype"
    ),
    "the weights are a pipe": damaged(pipe(WEIGHTS), WeightError, WEIGHTS),
    "only pickled weights": damaged(
        renamed(WEIGHTS, "pytorch_model.bin"), WeightError, "pytorch_model.bin", "never"
    ),
    "generation_config.json is a pipe": damaged(
        pipe("generation_config.json"), ModelError, "generation_config.json", "FIFO"
    ),
    "the index is nested too deeply": damaged(
        nested_index, WeightError, "model.safetensors.index.json", "levels deep"
    ),
    "tokenizer_config.json is nested too deeply": damaged(
        content("tokenizer_config.json", "[" * 1_000_000),
        ModelError,
        "tokenizer_config.json",
        "levels deep",
    ),
    "the header exceeds the maximum length": damaged(
        long_header, WeightError, WEIGHTS, "truncated or not a safetensors file"
    ),
    "config.json names a class": damaged(
        config_fields(architectures=["evil:M"]), ModelError, "config.json", "installed model"
    ),
    "a token id of 2**32-1": damaged(
        content(
            "tokenizer.json",
            '{"version": "1.0", "added_tokens": [], "model": '
            '{"type": "BPE", "vocab": {"a": 4294967295}, "merges": []}}',
        ),
        ModelError,
        "tokenizer.json",
        "4294967295",
    ),
    "a broken index": damaged(
        renamed(WEIGHTS, "model.safetensors.index.json"), WeightError, "index.json"
    ),
    "tokenizer.json is truncated": damaged(
        content("tokenizer.json", '{"version": "1.0", '), ModelError, "tokenizer.json"
    ),
    "tokenizer.json is a pipe": damaged(pipe("tokenizer.json"), ModelError, "tokenizer.json"),
    "tokenizer_config.json is broken": damaged(
        content("tokenizer_config.json", "{"), ModelError, "tokenizer_config.json"
    ),
    "an added token without an id": damaged(
        content("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}'),
        ModelError,
        "tokenizer_config.json",
        "'x'",
    ),
    "a chat template that is not text": damaged(
        content("chat_template.jinja", b"\xff\xfe{"), ModelError, "chat_template.jinja"
    ),
    "a tokenizer of a larger model": damaged(
        fewer_ids(20), ModelError, "tokenizer.json", "vocab_size"
    ),
}

NO_SIZE = {"kv_cache_memory_bytes": None}
SETTINGS = [
    setting(ConfigError, gpu_memory_utilization=-0.5),
    setting(ConfigError, gpu_memory_utilization=math.nan),
    setting(CapacityError, gpu_memory_utilization=1e-6, **NO_SIZE),
    setting(CapacityError, "2048 bytes", kv_cache_memory_bytes=1),
    setting(CapacityError, "max_model_len=200", kv_cache_memory_bytes=20_000, max_model_len=200),
    setting(CapacityError, num_gpu_blocks_override=2**31 - 1, **NO_SIZE),
    setting(ConfigError, kv_cache_memory_bytes=1 << 20, num_gpu_blocks_override=8),
    setting(ConfigError, max_num_batched_tokens=4, max_num_seqs=8),
    setting(ConfigError, enable_chunked_prefill=False, max_num_batched_tokens=32),
    setting(ConfigError, long_prefill_token_threshold=8, enable_chunked_prefill=False),
    setting(ConfigError, max_num_seqs=-1),
    setting(ConfigError, max_model_len=0),
    setting(ConfigError, block_size=-4),
    setting(ConfigError, seed=-1),
    setting(ConfigError, num_threads=0),
    setting(ConfigError, dtype="int3"),
    setting(ConfigError, kv_cache_dtype="int3"),
    setting(ConfigError, tensor_parallel_size=0),
    setting(ConfigError, tensor_parallel_size=HUGE),
    setting(ConfigError, "num_attention_heads=4", tensor_parallel_size=8),
    setting(ConfigError, "multiproc", tensor_parallel_size=2, executor_backend="uniproc"),
    setting(ConfigError, trust_remote_code=True),
    setting(ConfigError, revision="main"),
    setting(PluginNotFoundError, "'int9'", "Did you mean 'int8'", quantization="int9"),
    setting(ConfigError, quantization="int8", linear_method="int4"),
    setting(ConfigError, "bfloat16", quantization="int8", dtype="float32"),
    setting(PluginNotFoundError, "'flash'", attention_backend="flash"),
    setting(ContractError, "scheduler", "99.0", "OldContract", scheduler_cls=OldContract),
    setting(ContractError, "worker", "join", worker_cls="os.path:join"),
    setting(ConfigError, "'cpu'", "'nothing'", plugin_options={"cpu": {"nothing": 1}}),
    setting(ConfigError, tokenizer="/nowhere"),
    setting(ConfigError, decision_log="/nowhere/log"),
]


def options_of(case):
    return ",".join(f"{name}={value}" for name, value in case.options.items())


def message_of(case, folder):
    """Start an engine that must fail as the case states. Return the message."""
    with pytest.raises(case.error) as rejection:
        LLM(folder, **(OPTIONS | case.options))
    return str(rejection.value)


@pytest.mark.costly
@pytest.mark.parametrize("name", FILES)
def test_the_error_for_a_damaged_model_names_the_file_or_field(name, model_dir, tmp_path):
    case = FILES[name]
    folder = shutil.copytree(model_dir, tmp_path / "model")
    case.damage(folder)
    message = message_of(case, folder)
    assert all(word in message for word in case.words), message


@pytest.mark.costly
@pytest.mark.parametrize("case", SETTINGS, ids=options_of)
def test_the_error_for_an_invalid_setting_names_it(case, model_dir):
    message = message_of(case, model_dir)
    # The message names the class that does not qualify.
    assert case.error is ContractError or any(name in message for name in case.options), message
    assert all(word in message for word in case.words), message


@pytest.mark.costly
def test_an_engine_process_rejects_a_damaged_model(model_dir, tmp_path):
    case = FILES["NaN in a weight"]
    folder = shutil.copytree(model_dir, tmp_path / "model")
    case.damage(folder)
    with pytest.raises(WeightError, match=GATE):
        LLM(folder, engine_process=True, **OPTIONS)


@pytest.mark.parametrize("folder", ["of_a_long_name" * 8, "that/is/not/there"])
def test_the_error_for_an_unusable_socket_directory_mentions_tmpdir(
    folder, model_dir, tmp_path, monkeypatch
):
    if "/" not in folder:
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / folder))
    with pytest.raises(ConfigError, match="TMPDIR"):
        LLM(model_dir, engine_process=True, **OPTIONS)


def test_an_engine_starts_after_all_failed_starts(model_dir):
    with LLM(model_dir, **OPTIONS) as llm:
        assert llm.generate("x", SamplingParams(max_tokens=1))[0].outputs[0].token_ids


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--quantization", "int9"], "quantization"),
        (["--kv-cache-memory-bytes", "1"], "kv_cache_memory_bytes"),
        (["--tokenizer", "/nowhere"], "tokenizer='/nowhere'"),
    ],
)
def test_the_command_line_reports_a_failure_in_three_lines(arguments, word, model_dir):
    run = "import sys; from dovetail.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", run, "generate", "--model", str(model_dir), *arguments, "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2, done.stderr
    assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 3
