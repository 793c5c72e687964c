import dataclasses
import inspect
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.config import EngineArgs, EngineConfig
from dovetail.errors import ConfigError, ModelError


class SomePlugin:
    pass


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64}
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "eos_token_id": 7})
    )
    return path


def create(model: object, **options: object) -> EngineConfig:
    return EngineArgs.from_kwargs(model=model, **options).create_engine_config()


def rejection(model: object, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        create(model, **options)
    message = str(caught.value)
    assert len(message.splitlines()) <= 3
    assert "pydantic" not in message and "validation error" not in message
    return message


PUBLIC_NAMES = [
    "model",
    "tokenizer",
    "tokenizer_mode",
    "skip_tokenizer_init",
    "trust_remote_code",
    "model_impl",
    *("runner", "pooling_type"),
    "revision",
    "dtype",
    "seed",
    "max_model_len",
    "hf_overrides",
    "served_model_name",
    "generation_config",
    "override_generation_config",
    "enforce_eager",
    "max_logprobs",
    "load_format",
    "use_tqdm_on_load",
    "block_size",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "kv_cache_dtype",
    "kv_cache_scales",
    "enable_prefix_caching",
    "enable_sleep_mode",
    "cpu_offload_gb",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "long_prefill_token_threshold",
    "scheduler_cls",
    "scheduling_policy",
    "async_scheduling",
    "pipeline_depth",
    "num_lookahead_tokens",
    "max_num_encoder_tokens",
    "encoder_cache_tokens",
    "admission_timeout_s",
    "platform",
    "worker_cls",
    "worker_extension_cls",
    "executor_backend",
    "distributed_executor_backend",
    "engine_process",
    "start_timeout_s",
    "attention_backend",
    "linear_method",
    "quantization",
    "ops",
    "batch_invariant",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "num_threads",
    "graph_mode",
    "max_graph_size",
    "custom_all_reduce",
    "matmul_precision",
    "compile_level",
    "compile_backend",
    "compile_passes",
    "compile_sizes",
    "compile_cache",
    "disable_log_stats",
    "decision_log",
    "stat_loggers",
    "logits_processors",
    "step_extensions",
    "admission_gates",
    "grammar_backend",
    "tool_parser",
    "reasoning_parser",
    "io_processor",
    "kv_connector",
    "kv_transfer_timeout_s",
    "hooks",
    "max_prompt_chars",
    "max_id_chars",
    "max_stop_strings",
    "max_stop_chars",
    "max_bad_words",
    "max_bad_word_chars",
    "max_bad_words_chars",
    "max_extra_args_bytes",
    "max_prompts",
    "max_chat_messages",
    "plugin_options",
    "plugins_allow",
    "plugins_deny",
    "no_plugins",
    "plugins_strict",
    "trust_local_code",
    "http_routes",
]


def test_public_option_names_match_the_recorded_names() -> None:
    assert [option.name for option in dataclasses.fields(EngineArgs)] == PUBLIC_NAMES


def test_every_option_has_a_help_text() -> None:
    descriptions = EngineArgs.descriptions()
    assert list(descriptions) == list(inspect.signature(EngineArgs).parameters)
    for name, text in descriptions.items():
        assert text.endswith(".") and len(text) <= 75, name


def test_importing_the_options_does_not_import_pydantic() -> None:
    code = (
        "import sys; from dovetail.config import EngineArgs; EngineArgs('m');"
        "print(sorted({'pydantic', 'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_in_the_config_package_raises_an_attribute_error() -> None:
    import dovetail.config

    with pytest.raises(AttributeError, match="no attribute 'EngineConfigs'"):
        _ = dovetail.config.EngineConfigs


def test_an_unknown_option_is_reported_with_the_nearest_name() -> None:
    expected = "Unknown engine option 'max_num_seq'. Did you mean 'max_num_seqs'?"
    for make in (EngineArgs, EngineArgs.from_kwargs):
        with pytest.raises(ConfigError) as caught:
            make(model="m", max_num_seq=3)
        assert str(caught.value) == expected


def test_the_model_option_is_required() -> None:
    with pytest.raises(ConfigError, match="model is missing; specify"):
        EngineArgs.from_kwargs()


def test_engine_options_are_frozen() -> None:
    args = EngineArgs("m")
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.model = "n"
    assert dataclasses.replace(args, seed=3).seed == 3


def test_options_without_a_value_remain_unset(model: Path) -> None:
    config = create(model)
    assert config.model.model == config.model.served_model_name == str(model)
    assert config.model.model_dir == config.model.tokenizer_dir == model
    assert config.model.architecture == "LlamaForCausalLM"
    assert config.model.hf_config["max_position_embeddings"] == 64
    assert config.model.dtype == "auto"
    assert config.scheduler.max_num_seqs is None
    assert config.parallel.platform == "auto"


def test_given_values_are_passed_to_the_engine_config(model: Path) -> None:
    config = create(
        model,
        dtype="half",
        served_model_name="tiny",
        gpu_memory_utilization=1,
        worker_cls=SomePlugin,
        num_threads=2,
        plugin_options={"mine": {"a": [1]}},
        hf_overrides={"max_position_embeddings": 128},
        use_tqdm_on_load=False,
    )
    assert config.model.dtype == "float16"
    assert config.model.served_model_name == "tiny"
    assert config.cache.gpu_memory_utilization == 1.0
    assert config.parallel.worker_cls is SomePlugin
    assert config.compute.num_threads == 2
    assert config.plugin_options == {"mine": {"a": (1,)}}
    assert config.model.hf_config["max_position_embeddings"] == 128
    assert config.load.use_tqdm_on_load is False


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("trust_remote_code", True, "install a plugin"),
        ("trust_remote_code", 1, "install a plugin"),
        ("revision", "main", "Only models on the hub have revisions"),
        ("tensor_parallel_size", 0, "an integer from 1 to 64"),
        ("pipeline_parallel_size", 2, "Set it to 1"),
        ("data_parallel_size", 0, "Set it to 1"),
        ("tensor_parallel_size", True, "an integer from 1 to 64"),
        ("dtype", "float8", "one of float32, bfloat16, float16"),
        ("kv_cache_dtype", "int3", "one of float32, float16, bfloat16"),
        ("max_model_len", 1, "an integer from 2 to"),
        ("max_model_len", "4k", "an integer from 2 to"),
        ("max_model_len", 2**31, "an integer from 2 to"),
        ("seed", -1, "an integer from 0 to"),
        ("seed", None, "an integer from 0 to"),
        ("max_logprobs", -1, "an integer from 0 to 1024"),
        ("max_logprobs", 1025, "an integer from 0 to 1024"),
        ("block_size", 0, "None or an integer from 1 to 4096"),
        ("block_size", 16.0, "None or an integer from 1 to 4096"),
        ("gpu_memory_utilization", 0, "positive fraction of at most 1"),
        ("gpu_memory_utilization", 1.1, "positive fraction of at most 1"),
        ("gpu_memory_utilization", float("nan"), "positive fraction of at most 1"),
        ("gpu_memory_utilization", True, "positive fraction of at most 1"),
        ("gpu_memory_utilization", "0.9", "positive fraction of at most 1"),
        ("kv_cache_memory_bytes", 0, "None or an integer from 1"),
        ("num_gpu_blocks_override", 0, "None or an integer from 1"),
        ("max_num_seqs", 0, "None or an integer from 1 to 65536"),
        ("max_num_seqs", True, "None or an integer from 1 to 65536"),
        ("max_num_batched_tokens", 0, "None or an integer from 1"),
        ("long_prefill_token_threshold", -1, "an integer from 0"),
        ("num_threads", 0, "None or an integer from 1 to 4096"),
        ("graph_mode", "always", "one of full_and_piecewise, full, piecewise, none"),
        ("max_graph_size", 0, "an integer from 1 to 8192"),
        ("custom_all_reduce", "yes", "True or False"),
        ("matmul_precision", 32, "one of highest, high, medium"),
        ("compile_level", "twice", "None or one of none, as_is, once, piecewise"),
        ("compile_backend", 7, "must name a plugin"),
        ("compile_passes", "mine", "a list of plugins"),
        ("compile_sizes", 8, "a list of at most 64 integers from 1"),
        ("compile_sizes", ["8", "all"], "a list of at most 64 integers from 1"),
        ("compile_sizes", [0], "a list of at most 64 integers from 1"),
        ("compile_sizes", [True], "a list of at most 64 integers from 1"),
        ("compile_cache", "", "path of a local directory"),
        ("compile_cache", 5, "path of a local directory"),
        ("enable_prefix_caching", "yes", "True or False"),
        ("enable_chunked_prefill", 1, "None, True or False"),
        ("enable_sleep_mode", 1, "True or False"),
        ("kv_cache_scales", "head", "None or one of token, layer"),
        ("cpu_offload_gb", -0.5, "a number of GiB from 0 to 1048576"),
        ("cpu_offload_gb", float("nan"), "a number of GiB from 0"),
        ("cpu_offload_gb", True, "a number of GiB from 0"),
        ("enforce_eager", None, "True or False"),
        ("worker_cls", "", "must name a plugin"),
        ("attention_backend", None, "must name a plugin"),
        ("scheduler_cls", 7, "must name a plugin"),
        ("quantization", "", "the name of a plugin"),
        ("served_model_name", ["a", "b"], "must be a string"),
        ("served_model_name", "", "must be a string"),
        ("hf_overrides", ["a"], "a mapping with strings as keys"),
        ("override_generation_config", "a", "a mapping with strings as keys"),
        ("plugin_options", {1: 2}, "a mapping with strings as keys"),
        ("generation_config", "no/such/place", "use"),
        ("generation_config", 5, "path of a local directory"),
        ("tokenizer", "no/such/place", "has tokenizer.json"),
        ("tokenizer", 5, "path of a local directory"),
        ("model", "", "path or name of a model"),
        ("model", 5, "path or name of a model"),
    ],
)
def test_option_errors_name_the_option_the_value_and_the_remedy(
    model: Path, option: str, value: object, remedy: str
) -> None:
    message = rejection(**{"model": model, option: value})
    assert f"{option}={value!r}" in message
    assert remedy in message


def test_long_values_are_shortened_in_messages(model: Path) -> None:
    assert len(rejection(model, dtype="x" * 5000)) < 300


def test_many_errors_are_reported_in_three_lines(model: Path) -> None:
    message = rejection(
        model, seed=-1, max_logprobs=-1, max_model_len=0, dtype="a", enforce_eager=3
    )
    assert len(message.splitlines()) == 3 and "(and 2 more)" in message


def test_the_two_cache_size_options_cannot_be_given_together(model: Path) -> None:
    message = rejection(model, kv_cache_memory_bytes=5, num_gpu_blocks_override=6)
    assert "kv_cache_memory_bytes=5" in message
    assert "num_gpu_blocks_override=6" in message
    assert "set only one of them" in message


def test_a_token_budget_below_max_num_seqs_is_rejected(model: Path) -> None:
    message = rejection(model, max_num_batched_tokens=7, max_num_seqs=8)
    assert "max_num_batched_tokens=7" in message
    assert "max_num_seqs=8" in message
    assert "raise the former or lower the latter" in message


def test_a_long_prefill_threshold_without_chunked_prefill_is_rejected(model: Path) -> None:
    message = rejection(model, long_prefill_token_threshold=9, enable_chunked_prefill=False)
    assert "long_prefill_token_threshold=9" in message
    assert "enable_chunked_prefill=False" in message


@pytest.mark.parametrize(
    ("other", "name", "group"),
    [
        ("scheduling_policy", "scheduler_cls", "scheduler"),
        ("distributed_executor_backend", "executor_backend", "parallel"),
        ("quantization", "linear_method", "compute"),
    ],
)
def test_aliases_of_engine_options_are_accepted(
    model: Path, other: str, name: str, group: str
) -> None:
    for options in ({other: "a"}, {name: "a"}, {other: "a", name: "a"}):
        assert getattr(getattr(create(model, **options), group), name) == "a"
    assert getattr(getattr(create(model, **{other: SomePlugin}), group), name) is SomePlugin
    message = rejection(model, **{other: "a", name: "b"})
    assert f"{other}='a' conflicts with {name}='b'" in message
    assert "set only one of them" in message


def test_uni_and_mp_are_aliases_of_executors(model: Path) -> None:
    options = {"distributed_executor_backend": "uni", "executor_backend": "uniproc"}
    assert create(model, **options).parallel.executor_backend == "uniproc"
    assert create(model, executor_backend="uni").parallel.executor_backend == "uniproc"
    assert create(model, executor_backend="mp").parallel.executor_backend == "multiproc"


def test_options_of_the_generation_config_are_applied(model: Path, tmp_path: Path) -> None:
    def chosen(**options: object) -> object:
        return create(model, **options).model.generation_config

    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_k": 3}')
    assert chosen() == {"temperature": 0.6, "eos_token_id": 7}
    assert chosen(generation_config="none") == {"eos_token_id": 7}
    assert chosen(generation_config="vllm") == {"eos_token_id": 7}
    assert chosen(generation_config=other) == {"top_k": 3}
    assert chosen(generation_config=str(other / "generation_config.json")) == {"top_k": 3}
    over = {"temperature": 0.1, "top_p": 0.5}
    assert chosen(override_generation_config=over) == {**over, "eos_token_id": 7}


def test_invalid_generation_overrides_are_rejected(model: Path) -> None:
    message = rejection(model, override_generation_config={"temprature": 1})
    assert "the unknown key 'temprature'. Did you mean 'temperature'?" in message
    message = rejection(model, override_generation_config={"top_p": 2})
    assert "override_generation_config={'top_p': 2}" in message and "top_p=2 must be" in message
    message = rejection(model, override_generation_config={"eos_token_id": "a"})
    assert "eos_token_id='a'" in message


def test_an_invalid_generation_config_is_reported_at_creation(model: Path) -> None:
    (model / "generation_config.json").write_text('{"top_p": 3}')
    with pytest.raises(ModelError, match="top_p=3 must be"):
        create(model)
    assert create(model, generation_config="none").model.generation_config == {}


def test_the_tokenizer_can_be_in_another_directory(model: Path, tmp_path: Path) -> None:
    assert create(model, tokenizer=str(tmp_path)).model.tokenizer_dir == tmp_path


def test_an_auto_map_in_hf_overrides_is_logged(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="dovetail"):
        create(model, hf_overrides={"auto_map": {"AutoModel": "m.M"}})
    assert "auto_map" in caplog.text
