from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dovetail.config import Change, EngineConfig, RequestedConfig
from dovetail.config.resolve import resolve
from dovetail.errors import ConfigError, ContractError, ModelError
from dovetail.interfaces.platform import ConfigPatch, Platform, PlatformInfo, Probe
from dovetail.interfaces.requested_config import RequestedModel

ALL_DTYPES = ("float32", "bfloat16", "float16")


class SomeWorker:
    pass


class FakePlatform(Platform):
    info = PlatformInfo(name="fake", device_type="fake")

    def __init__(
        self,
        dtypes: Sequence[str] = ALL_DTYPES,
        changes: Mapping[str, tuple[object, str]] | None = None,
        problems: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._dtypes = dtypes
        self._changes = changes or {}
        self._problems = problems
        self.configs: list[EngineConfig] = []

    @classmethod
    def probe(cls) -> Probe:
        return Probe(usable=True)

    def capabilities(self) -> frozenset[str]:
        return frozenset({"graphs", *(f"dtype.{name}" for name in self._dtypes)})

    def total_memory_bytes(self, local_rank: int = 0) -> int:
        return 2**30

    def defaults(self, config: RequestedConfig) -> ConfigPatch:
        return ConfigPatch(changes=self._changes)

    def problems(self, config: EngineConfig) -> Sequence[str]:
        self.configs.append(config)
        return self._problems


def config_of(hf_config: Mapping[str, Any] | None = None, **requested: Any) -> RequestedConfig:
    """Make a requested configuration. The name of an option is "section__field"."""
    groups: dict[str, dict[str, Any]] = {}
    for path, value in requested.items():
        group, field = path.split("__")
        groups.setdefault(group, {})[field] = value
    model = {
        "model": "tiny",
        "model_dir": Path("/m/tiny"),
        "tokenizer_dir": Path("/m/tiny"),
        "architecture": "LlamaForCausalLM",
        "hf_config": {"max_position_embeddings": 64, "dtype": "bfloat16", **(hf_config or {})},
        "served_model_name": "tiny",
        **groups.pop("model", {}),
    }
    return RequestedConfig(model=RequestedModel(**model), **groups)


def reason_of(config: EngineConfig, field: str) -> str:
    (change,) = [change for change in config.explain() if change.field == field]
    group, leaf = field.split(".")
    assert change.after == getattr(getattr(config, group), leaf)
    return change.reason


def rejection(config: RequestedConfig, platform: Platform | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(config, platform or FakePlatform())
    assert len(str(caught.value).splitlines()) <= 3
    return str(caught.value)


def test_every_unset_config_field_is_resolved() -> None:
    config = config_of()
    resolved = resolve(config, FakePlatform())
    seen = {change.field: (change.before, change.after) for change in resolved.explain()}
    assert seen == {
        "model.dtype": ("auto", "bfloat16"),
        "model.max_model_len": (None, 64),
        "scheduler.enable_chunked_prefill": (None, True),
        "scheduler.max_num_seqs": (None, 256),
        "scheduler.max_num_batched_tokens": (None, 2048),
        "cache.block_size": (None, 16),
        "cache.kv_cache_dtype": ("auto", "bfloat16"),
        "load.load_format": ("auto", "safetensors"),
        "model.tokenizer_mode": ("auto", "huggingface"),
        "parallel.platform": ("auto", "fake"),
        "scheduler.scheduler_cls": ("auto", "fcfs"),
        "scheduler.async_scheduling": (None, False),
        "scheduler.pipeline_depth": (None, 1),
        "scheduler.encoder_cache_tokens": (None, 0),
        "cache.gpu_memory_utilization": (None, 0.9),
        "parallel.executor_backend": ("auto", "uniproc"),
        "compute.compile_level": (None, "none"),
    }
    assert all(change.reason for change in resolved.explain())
    assert config.model.dtype == "auto"


def test_the_multiproc_executor_is_the_default_for_several_workers() -> None:
    resolved = resolve(config_of(parallel__tensor_parallel_size=2), FakePlatform())
    assert resolved.parallel.executor_backend == "multiproc"
    assert "tensor_parallel_size=2" in resolved.explain()[-1].reason
    chosen = config_of(parallel__tensor_parallel_size=2, parallel__executor_backend="mine")
    assert resolve(chosen, FakePlatform()).parallel.executor_backend == "mine"


def test_plugins_selected_at_load_time_are_none_in_the_resolved_config() -> None:
    resolved = resolve(config_of(), FakePlatform())
    assert resolved.parallel.worker_cls is None
    compute = resolved.compute
    assert compute.attention_backend is compute.linear_method is compute.ops is None
    assert compute.num_threads is None


def test_values_given_by_the_user_are_not_changed() -> None:
    config = config_of(
        model__dtype="float16",
        model__max_model_len=32,
        cache__block_size=8,
        cache__gpu_memory_utilization=0.25,
        cache__kv_cache_dtype="fp8",
        cache__kv_cache_scales="token",
        scheduler__max_num_seqs=4,
        scheduler__max_num_batched_tokens=9,
        scheduler__enable_chunked_prefill=True,
        scheduler__scheduler_cls=SomeWorker,
        scheduler__async_scheduling=True,
        scheduler__pipeline_depth=2,
        scheduler__encoder_cache_tokens=0,
        parallel__executor_backend="mine",
        load__load_format="dummy",
        model__tokenizer_mode="mine",
        parallel__platform="mine",
        compute__compile_level="once",
    )
    resolved = resolve(config, FakePlatform())
    for section in ("model", "cache", "scheduler", "load"):
        assert dict(getattr(resolved, section)) == dict(getattr(config, section))
    assert resolved.explain() == []


def test_resolving_the_same_config_gives_the_same_result() -> None:
    once = resolve(config_of(), FakePlatform())
    assert resolve(config_of(), FakePlatform()) == once
    assert EngineConfig.model_validate_json(once.model_dump_json()) == once


@pytest.mark.parametrize(
    ("stated", "usable", "expected", "words"),
    [
        ({"dtype": "bfloat16"}, ALL_DTYPES, "bfloat16", "states bfloat16"),
        ({"dtype": None, "torch_dtype": "float16"}, ALL_DTYPES, "float16", "states float16"),
        ({"dtype": "torch.float16"}, ALL_DTYPES, "float16", "states float16"),
        ({"dtype": "float32"}, ALL_DTYPES, "float32", "states float32"),
        ({"dtype": None}, ALL_DTYPES, "float32", "no dtype"),
        ({"dtype": "bfloat16"}, ("float32", "float16"), "float32", "most similar"),
        ({"dtype": "bfloat16"}, ("float16",), "float16", "does not compute in bfloat16"),
        ({"dtype": "float16"}, ("float32", "bfloat16"), "float32", "most similar"),
        ({"dtype": "float32"}, ("bfloat16", "float16"), "bfloat16", "most similar"),
        ({"dtype": "bfloat16"}, (), "bfloat16", "states bfloat16"),
    ],
)
def test_dtype_auto_is_resolved_to_a_supported_dtype(
    stated: dict, usable: Sequence[str], expected: str, words: str
) -> None:
    resolved = resolve(config_of(stated), FakePlatform(usable))
    assert resolved.model.dtype == resolved.cache.kv_cache_dtype == expected
    assert words in reason_of(resolved, "model.dtype")
    assert reason_of(resolved, "cache.kv_cache_dtype")


def test_unsupported_dtypes_are_rejected() -> None:
    message = rejection(config_of(model__dtype="float16"), FakePlatform(("float32",)))
    assert "dtype='float16'" in message and "'fake' supports float32" in message
    assert 'dtype="auto"' in message
    message = rejection(config_of({"dtype": "float64"}))
    assert "'float64'" in message and "set dtype to one of them" in message
    message = rejection(config_of(), FakePlatform(("int8",)))
    assert "does not compute in bfloat16" in message and "another platform" in message


def test_max_model_len_defaults_to_that_of_the_checkpoint() -> None:
    yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 1.5}}
    resolved = resolve(config_of(yarn), FakePlatform())
    assert resolved.model.max_model_len == 96
    assert "factor 1.5 of yarn" in reason_of(resolved, "model.max_model_len")


def test_max_model_len_has_a_default_if_config_json_states_no_length() -> None:
    silent = {"max_position_embeddings": None}
    resolved = resolve(config_of(silent), FakePlatform())
    assert resolved.model.max_model_len == 2048
    assert "states no length" in reason_of(resolved, "model.max_model_len")
    explicit = resolve(config_of(silent, model__max_model_len=10_000), FakePlatform())
    assert explicit.model.max_model_len == 10_000


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_position_embeddings": 1}, "gives a maximum length of 1 tokens"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 1e30}},
            r"of dynamic rope gives a maximum length of 6.4e\+31",
        ),
    ],
)
def test_the_error_for_an_impossible_length_in_config_json_states_the_length(
    fields: dict[str, Any], words: str
) -> None:
    hostile = {"max_position_embeddings": 64, **fields}
    with pytest.raises(ModelError, match=f"config.json: .*{words}"):
        resolve(config_of(hostile), FakePlatform())


def test_max_model_len_above_the_models_limit_is_rejected() -> None:
    rotary = {"rope_theta": 1e4}
    message = rejection(config_of(rotary, model__max_model_len=65))
    assert "max_model_len=65" in message and "64 tokens" in message
    assert 'hf_overrides={"max_position_embeddings": 65}' in message
    raised = config_of({"max_position_embeddings": 65}, model__max_model_len=65)
    assert resolve(raised, FakePlatform()).model.max_model_len == 65


@pytest.mark.parametrize(
    "hf_config",
    [
        {},
        {"max_position_embeddings": None, "n_positions": 64},
        {"rope_scaling": {"rope_type": "yarn", "factor": 1.0}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 1.0}},
    ],
)
def test_a_length_override_is_not_suggested_if_it_would_change_the_model(hf_config: dict) -> None:
    message = rejection(config_of(hf_config, model__max_model_len=65))
    assert "64 tokens" in message and "hf_overrides" not in message


def test_the_suggested_length_override_sets_every_length_field_and_is_accepted() -> None:
    two = {"n_positions": 50, "rope_theta": 1e4}
    message = rejection(config_of(two, model__max_model_len=65))
    assert 'hf_overrides={"max_position_embeddings": 65, "n_positions": 65}' in message
    followed = {"max_position_embeddings": 65, "n_positions": 65, "rope_theta": 1e4}
    resolved = resolve(config_of(followed, model__max_model_len=65), FakePlatform())
    assert resolved.model.max_model_len == 65


def test_max_model_len_can_be_the_scaled_length_of_linear_rope() -> None:
    linear = {"rope_scaling": {"type": "linear", "factor": 4.0}}
    resolved = resolve(config_of(linear, model__max_model_len=256), FakePlatform())
    assert resolved.model.max_model_len == 256
    assert "256 tokens" in rejection(config_of(linear, model__max_model_len=257))


@pytest.mark.parametrize(
    "hf_config",
    [
        {"max_position_embeddings": "64"},
        {"max_position_embeddings": 0},
        {"max_position_embeddings": True},
        {"rope_scaling": {"type": "linear", "factor": "2"}},
        {"rope_scaling": {"type": "linear", "factor": float("inf")}},
    ],
)
def test_the_error_for_a_length_that_is_not_a_positive_number_names_the_field(
    hf_config: dict,
) -> None:
    with pytest.raises(ModelError, match=r"(max_position_embeddings|factor)=.*must be a positive"):
        resolve(config_of(hf_config), FakePlatform())


@pytest.mark.parametrize(
    ("changes", "seqs", "budget", "words"),
    [
        ({"max_num_seqs": 3000}, 3000, 3000, "max_num_seqs=3000 requests needs a token"),
        ({"max_num_batched_tokens": 8}, 8, 8, "max_num_batched_tokens=8 tokens"),
        ({"enable_chunked_prefill": False}, 256, 5000, "prompt must fit"),
        ({"enable_chunked_prefill": False, "max_num_seqs": 6000}, 6000, 6000, "prompt must fit"),
        ({"max_num_seqs": 2048}, 2048, 2048, "the default"),
    ],
)
def test_step_limits_have_consistent_defaults(
    changes: dict, seqs: int, budget: int, words: str
) -> None:
    kwargs = {f"scheduler__{name}": value for name, value in changes.items()}
    resolved = resolve(config_of({"max_position_embeddings": 5000}, **kwargs), FakePlatform())
    assert resolved.scheduler.max_num_seqs == seqs
    assert resolved.scheduler.max_num_batched_tokens == budget
    reasons = [c.reason for c in resolved.explain() if c.field.startswith("scheduler.max_num")]
    assert any(words in reason for reason in reasons)


def test_a_token_budget_below_max_model_len_requires_chunked_prefill() -> None:
    changes = {"scheduler__max_num_batched_tokens": 63}
    assert resolve(config_of(**changes), FakePlatform()).model.max_model_len == 64
    message = rejection(config_of(**changes, scheduler__enable_chunked_prefill=False))
    assert "max_num_batched_tokens=63" in message and "max_model_len=64" in message
    assert "enable_chunked_prefill=False" in message and "raise the former" in message
    exact = config_of(scheduler__max_num_batched_tokens=64, scheduler__enable_chunked_prefill=False)
    assert resolve(exact, FakePlatform()).scheduler.max_num_batched_tokens == 64


def test_platform_defaults_set_only_unset_fields() -> None:
    platform = FakePlatform(
        changes={
            "cache.block_size": (128, "pages suit it"),
            "model.dtype": ("half", "fast here"),
            "parallel.worker_cls": (SomeWorker, "its own"),
            "scheduler.max_num_seqs": (512, "many cores"),
            "cache.gpu_memory_utilization": (0.5, "others use it, too"),
        }
    )
    resolved = resolve(config_of(scheduler__max_num_seqs=2), platform)
    assert resolved.cache.block_size == 128
    assert resolved.model.dtype == "float16"
    assert resolved.parallel.worker_cls is SomeWorker
    assert resolved.scheduler.max_num_seqs == 2
    assert resolved.cache.gpu_memory_utilization == 0.5
    assert resolved.explain()[0] == Change(
        field="cache.block_size",
        before=None,
        after=128,
        reason="platform fake: pages suit it",
    )
    (worker,) = [c for c in resolved.explain() if c.field == "parallel.worker_cls"]
    assert worker.after == f"{__name__}:SomeWorker"


def test_platform_defaults_that_conflict_with_user_values_are_dropped() -> None:
    platform = FakePlatform(
        changes={
            "scheduler.max_num_batched_tokens": (512, "small caches"),
            "scheduler.max_num_seqs": (64, "few cores"),
            "cache.kv_cache_memory_bytes": (1000, "half of the memory"),
            "model.max_model_len": (4096, "it likes long ones"),
        }
    )
    many = resolve(config_of(scheduler__max_num_seqs=1000), platform)
    assert many.scheduler.max_num_batched_tokens == 1000
    assert many.cache.kv_cache_memory_bytes == 1000
    assert many.model.max_model_len == 64
    narrow = resolve(config_of(scheduler__max_num_batched_tokens=10), platform)
    assert narrow.scheduler.max_num_seqs == 10
    blocks = resolve(config_of(cache__num_gpu_blocks_override=5), platform)
    assert blocks.cache.kv_cache_memory_bytes is None


def test_invalid_platform_defaults_are_reported_as_contract_errors_of_the_platform() -> None:
    for changes, words in (
        (
            {"cache.blocksize": (16, "")},
            r"default for 'cache\.blocksize'.*block_size",
        ),
        ({"model.architecture": ("X", "")}, "not a field that a platform may set"),
        (
            {"cache.block_size": (0, "why not")},
            "sets an invalid default: block_size=0",
        ),
        (
            {"model.dtype": ("int4", "small")},
            "sets an invalid default: dtype='int4'",
        ),
        (
            {"cache.block_size": (16, " ")},
            r"cache.block_size to \(16, ' '\); it must be a tuple \(value, reason\)",
        ),
        ({"cache.block_size": 16}, r"to 16; it must be a tuple \(value, reason\)"),
    ):
        with pytest.raises(ContractError, match=words):
            resolve(config_of(), FakePlatform(changes=changes))


def test_a_config_is_rejected_if_the_platform_reports_a_problem() -> None:
    platform = FakePlatform(problems=["Blocks of 16 are too small here; use 128.", "No luck."])
    message = rejection(config_of(), platform)
    assert "'fake' cannot run this" in message
    assert "use 128. No luck." in message
    assert platform.configs[0].cache.block_size == 16
