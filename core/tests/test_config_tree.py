import copy
import json
import pickle
from pathlib import Path

import pytest
from pydantic import ValidationError

from dovetail.config import Change, EngineConfig, ExtensionsConfig, RequestedConfig
from dovetail.config.draft import Draft
from dovetail.errors import ConfigError
from dovetail.interfaces.requested_config import RequestedCache, RequestedModel, RequestedScheduler


class Outer:
    class SomePlugin:
        pass


def make(**sections: object) -> RequestedConfig:
    model = RequestedModel(
        model="tiny",
        model_dir=Path("/m/tiny"),
        tokenizer_dir=Path("/m/tiny"),
        architecture="LlamaForCausalLM",
        hf_config={"rope_scaling": {"factor": 2.0}, "eos_token_id": [1, 2], "limit": float("inf")},
        served_model_name="tiny",
    )
    return RequestedConfig(**{"model": model, **sections})


def make_resolved() -> EngineConfig:
    draft = Draft(make())
    for path, value in RESOLVED.items():
        draft.fill(path, value, "the default")
    return draft.finish()


RESOLVED = {
    "cache.block_size": 16,
    "cache.gpu_memory_utilization": 0.9,
    "cache.kv_cache_dtype": "float32",
    "compute.compile_level": "none",
    "load.load_format": "safetensors",
    "model.dtype": "float32",
    "model.max_model_len": 64,
    "model.tokenizer_mode": "huggingface",
    "parallel.executor_backend": "uniproc",
    "parallel.platform": "fake",
    "scheduler.async_scheduling": False,
    "scheduler.encoder_cache_tokens": 0,
    "scheduler.pipeline_depth": 1,
    "scheduler.enable_chunked_prefill": True,
    "scheduler.max_num_batched_tokens": 64,
    "scheduler.max_num_seqs": 4,
    "scheduler.scheduler_cls": "fcfs",
}


FIELDS = {
    "model": [
        "architecture",
        "defaults",
        "dtype",
        "enforce_eager",
        "generation_config",
        "hf_config",
        "max_logprobs",
        "max_model_len",
        "model",
        "model_dir",
        "pooler",
        "quantization",
        "seed",
        "served_model_name",
        "skip_tokenizer_init",
        "tokenizer_dir",
        "tokenizer_mode",
    ],
    "cache": [
        "block_size",
        "cpu_offload_gb",
        "enable_prefix_caching",
        "enable_sleep_mode",
        "gpu_memory_utilization",
        "kv_cache_dtype",
        "kv_cache_memory_bytes",
        "kv_cache_scales",
        "num_gpu_blocks_override",
    ],
    "scheduler": [
        "admission_timeout_s",
        "async_scheduling",
        "enable_chunked_prefill",
        "encoder_cache_tokens",
        "long_prefill_token_threshold",
        "max_num_batched_tokens",
        "max_num_encoder_tokens",
        "max_num_seqs",
        "num_lookahead_tokens",
        "pipeline_depth",
        "scheduler_cls",
    ],
    "parallel": [
        "data_parallel_size",
        "engine_process",
        "executor_backend",
        "pipeline_parallel_size",
        "platform",
        "start_timeout_s",
        "tensor_parallel_size",
        "worker_cls",
    ],
    "load": ["load_format", "use_tqdm_on_load"],
    "compute": [
        "attention_backend",
        "batch_invariant",
        "compile_backend",
        "compile_cache",
        "compile_level",
        "compile_passes",
        "compile_sizes",
        "custom_all_reduce",
        "graph_mode",
        "linear_method",
        "matmul_precision",
        "max_graph_size",
        "num_threads",
        "ops",
    ],
    "observability": ["decision_log", "disable_log_stats"],
    "extensions": sorted(ExtensionsConfig.model_fields),
    "limits": [
        "max_bad_word_chars",
        "max_bad_words",
        "max_bad_words_chars",
        "max_chat_messages",
        "max_extra_args_bytes",
        "max_id_chars",
        "max_prompt_chars",
        "max_prompts",
        "max_stop_chars",
        "max_stop_strings",
    ],
    "plugins": [
        "no_plugins",
        "plugins_allow",
        "plugins_deny",
        "plugins_strict",
        "trust_local_code",
    ],
}


@pytest.mark.parametrize("make_config", [make, make_resolved])
def test_config_fields_match_the_recorded_names(make_config) -> None:
    config = make_config()
    names = {
        section: sorted(type(node).model_fields)
        for section, node in dict(config).items()
        if hasattr(node, "model_fields_set")
    }
    assert names == FIELDS
    others = {"plugin_options"} if make_config is make else {"plugin_options", "changes"}
    assert set(dict(config)) - set(names) == others
    # 80 before graphs, matrix products, sleep mode, offload, scales, sums; 88 before compilation;
    # 92 before pooling.
    assert sum(map(len, names.values())) + 2 <= 93


def test_a_worker_gets_only_its_part_of_the_configuration() -> None:
    config = make_resolved()
    worker = config.worker_config()
    assert worker.model.max_model_len == 64 and worker.max_num_seqs == 4
    assert worker.cache == config.cache and worker.compute == config.compute
    fields = set(type(worker).model_fields) | set(type(worker.model).model_fields)
    absent = {"scheduler", "scheduler_cls", "enable_chunked_prefill", "limits", "plugins", "hooks"}
    absent |= {"tokenizer_dir", "tokenizer_mode", "served_model_name", "generation_config"}
    assert not fields & absent
    executor = config.executor_config()
    assert executor.worker == worker and executor.max_concurrent_steps == 1
    assert type(executor).model_validate_json(executor.model_dump_json()) == executor


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("scheduler", "max_num_seqs", None, "max_num_seqs=None must be an integer from 1 to"),
        ("cache", "block_size", None, "block_size=None must be an integer from 1 to 4096"),
        ("cache", "gpu_memory_utilization", None, "must be a positive fraction"),
        ("model", "dtype", "auto", "dtype='auto' must be one of float32"),
        (
            "load",
            "load_format",
            "auto",
            "load_format=.auto. is not resolved; set the name of a plugin",
        ),
        ("compute", "ops", "auto", "ops='auto' is not resolved"),
        ("scheduler", "async_scheduling", None, "must be True or False"),
    ],
)
def test_a_resolved_field_cannot_be_unset(
    section: str, field: str, value: object, message: str
) -> None:
    values = make_resolved().model_dump()
    values[section][field] = value
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**values)


def test_all_parts_of_a_configuration_are_frozen() -> None:
    config = make(plugin_options={"a": {"b": 1}})
    for node, field in ((config, "cache"), (config.cache, "block_size"), (config.model, "dtype")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(node, field, None)
    for mapping in (
        config.model.hf_config,
        config.model.hf_config["rope_scaling"],
        config.model.generation_config,
        config.plugin_options,
        config.plugin_options["a"],
    ):
        with pytest.raises(TypeError, match="frozen"):
            mapping["x"] = 1
        with pytest.raises(TypeError, match="frozen"):
            mapping.clear()


def test_a_configuration_copies_its_mappings() -> None:
    options = {"a": {"b": [1]}}
    config = make(plugin_options=options)
    options["a"]["b"].append(2)
    assert config.plugin_options == {"a": {"b": (1,)}}


def test_extension_fields_match_the_recorded_names() -> None:
    names = ["worker_extension_cls", "logits_processors", "step_extensions"]
    names += ["admission_gates", "grammar_backend", "tool_parser", "reasoning_parser"]
    names += ["io_processor", "kv_connector", "kv_transfer_timeout_s", "stat_loggers", "hooks"]
    names.append("http_routes")
    assert list(ExtensionsConfig.model_fields) == names


@pytest.mark.parametrize(
    ("fields", "report"),
    [
        ({"hooks": "mine"}, "hooks='mine' must be a list of plugins"),
        ({"stat_loggers": ["a", 3]}, r"stat_loggers\[1\]=3 must name a plugin"),
        ({"logits_processors": [""]}, r"logits_processors\[0\]='' must name a plugin"),
        ({"io_processor": 0}, "io_processor=0 must name a plugin"),
        (
            {"kv_transfer_timeout_s": 0},
            "kv_transfer_timeout_s=0 must be a positive number of seconds",
        ),
        ({"kv_transfer_timeout_s": True}, "kv_transfer_timeout_s=True must be a positive number"),
        (
            {"kv_transfer_timeout_s": float("nan")},
            "kv_transfer_timeout_s=nan must be a positive number",
        ),
    ],
)
def test_extensions_are_lists_of_plugins(fields: dict[str, object], report: str) -> None:
    with pytest.raises(ConfigError, match=report):
        ExtensionsConfig(**fields)


def test_an_empty_extension_name_disables_the_extension() -> None:
    assert ExtensionsConfig(worker_extension_cls="").worker_extension_cls is None


def test_a_configuration_round_trips_through_json() -> None:
    config = make_resolved()
    assert EngineConfig.model_validate_json(config.model_dump_json()) == config
    text = json.dumps(config.model_dump(mode="json"))
    again = EngineConfig.model_validate(json.loads(text))
    assert again == config
    assert again.explain()[0] == Change(
        field="cache.block_size", before=None, after=16, reason="the default"
    )


def test_the_json_of_a_configuration_contains_classes_by_name() -> None:
    config = make(scheduler=RequestedScheduler(scheduler_cls=Outer.SomePlugin))
    name = json.loads(config.model_dump_json())["scheduler"]["scheduler_cls"]
    assert name == f"{__name__}:Outer.SomePlugin"
    assert config.model_dump()["scheduler"]["scheduler_cls"] is Outer.SomePlugin


def test_copied_and_pickled_configurations_are_equal_and_frozen() -> None:
    config = make()
    for again in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert again == config
        with pytest.raises(TypeError, match="frozen"):
            again.model.hf_config["x"] = 1


@pytest.mark.parametrize("nested", [False, True])
def test_unknown_and_missing_config_fields_are_rejected(nested: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        if nested:
            make(cache={"blocksize": 3})
        else:
            RequestedCache(blocksize=3)
    expected = "Unknown field 'blocksize' in RequestedCache. Did you mean 'block_size'?"
    assert str(caught.value) == expected
    with pytest.raises(ConfigError, match="model is missing in RequestedConfig; set it"):
        RequestedConfig()


def test_invalid_json_values_raise_config_errors() -> None:
    values = make().model_dump(mode="json")
    values["cache"]["block_size"] = -1
    for reject in (
        lambda: RequestedConfig.model_validate(values),
        lambda: RequestedConfig.model_validate_json(json.dumps(values)),
        lambda: RequestedConfig(**values),
    ):
        with pytest.raises(ConfigError) as caught:
            reject()
        expected = "block_size=-1 must be None or an integer from 1 to 4096."
        assert str(caught.value) == expected


def test_invalid_json_is_rejected() -> None:
    with pytest.raises(ConfigError) as caught:
        RequestedConfig.model_validate_json("{")
    assert len(str(caught.value).splitlines()) == 1
    assert str(caught.value).startswith("RequestedConfig='{'")


def test_torch_dtypes_are_accepted() -> None:
    torch = pytest.importorskip("torch")
    values = dict(make().model)
    assert RequestedModel(**{**values, "dtype": torch.float16}).dtype == "float16"
    assert RequestedCache(kv_cache_dtype="fp8").kv_cache_dtype == "fp8_e4m3"
