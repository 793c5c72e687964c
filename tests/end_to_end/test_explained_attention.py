"""`explain attention` reports for every model the backend that the engine selects."""

from __future__ import annotations

import itertools
import json
import sys

import pytest

from dovetail import LLM, EngineArgs
from dovetail.cli import main
from dovetail.engine.choice import explain_choice
from dovetail.errors import DovetailError
from dovetail_devkit.contexts import SMALL_ENGINE
from dovetail_devkit.tiny_model import write_tiny_llama

OTHER_NAMES = """
from dataclasses import replace

import torch

from dovetail_models.families.llama import LlamaForCausalLM

NAMES = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}


class OtherNames(LlamaForCausalLM):
    # The names of GPT-2, and a logit cap under a name that only this model reads.
    architectures = ("OtherNames",)

    def __init__(self, context):
        config = {NAMES.get(key, key): value for key, value in context.hf_config.items()}
        super().__init__(replace(context, hf_config=config))
        for layer in self.model.layers:
            layer.self_attn.attn.soft_cap = float(context.hf_config.get("cap", 0))


class ReadsValues(LlamaForCausalLM):
    # Looks at values while it is made, which the device "meta" does not have.
    architectures = ("ReadsValues",)

    def __init__(self, context):
        super().__init__(context)
        self.scale = torch.ones(2).sum().item()


class Mistaken(LlamaForCausalLM):
    architectures = ("Mistaken",)

    def __init__(self, context):
        super().__init__(context)
        self.scale = context.hf_config["no_such_key"]
"""
RENAMED = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
MODELS = {
    "llama": ({}, False),
    "llama, heads of 20": ({"head_dim": 20}, False),
    "mistral, window": ({"architectures": ["MistralForCausalLM"], "sliding_window": 9}, False),
    "qwen2, window in the upper layers": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "sliding_window": 9,
            "use_sliding_window": True,
            "max_window_layers": 1,
        },
        False,
    ),
    "other field names": ({"head_dim": 32}, True),
    "other names, cap": ({"cap": 3}, True),
    "unknown": ({"architectures": ["GemmaForCausalLM"]}, False),
}
DTYPES = ["float32", "bfloat16", "float16"]
OPTIONS = [
    {},
    {"batch_invariant": True},
    {"kv_cache_dtype": "int8"},
    {"block_size": 24},
    {"attention_backend": "cpu"},
    {"attention_backend": "torch"},
]


@pytest.fixture(scope="module", autouse=True)
def other_names(tmp_path_factory):
    """Install models that use other field names in config.json."""
    site = tmp_path_factory.mktemp("site")
    (site / "other_names.py").write_text(OTHER_NAMES)
    info = site / "other_names-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-names\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[dovetail.model]\nOtherNames = other_names:OtherNames\n"
        "ReadsValues = other_names:ReadsValues\nMistaken = other_names:Mistaken\n"
    )
    sys.path.insert(0, str(site))
    yield
    sys.path.remove(str(site))
    sys.modules.pop("other_names", None)


@pytest.fixture
def write(tmp_path):
    """Write the checkpoint of an entry of MODELS."""

    def run(name):
        fields, renamed = MODELS[name]
        folder = write_tiny_llama(tmp_path, **fields)
        if renamed:
            config = json.loads((folder / "config.json").read_text())
            config = {RENAMED.get(key, key): value for key, value in config.items()}
            config["architectures"] = ["OtherNames"]
            (folder / "config.json").write_text(json.dumps(config))
        return folder

    return run


def engine_choice(model, options):
    """Return the name of the backend that an engine selects, or "" if it does not start."""
    try:
        with LLM(model, **options) as llm:
            chosen = llm.llm_engine.plugins.chosen
    except DovetailError:
        return ""
    return next(item.name for item in chosen if item.kind == "attention")


@pytest.mark.costly
@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", MODELS)
def test_the_explanation_names_the_backend_that_the_engine_selects(name, write):
    model, seen = write(name), set()
    for dtype, arguments in itertools.product(DTYPES, OPTIONS):
        options = {**SMALL_ENGINE, "skip_tokenizer_init": True, "dtype": dtype, **arguments}
        options["load_format"] = "dummy"
        explained = explain_choice("attention", EngineArgs(model=model, **options))
        names = [item.name for item in explained.chosen]
        expected = engine_choice(model, options)
        assert names == ([expected] if expected else []), (dtype, arguments, explained.error)
        assert bool(explained.error) is not bool(expected)
        seen.add(expected)
    assert seen >= ({""} if name == "unknown" else {"torch", ""})


@pytest.mark.costly
@pytest.mark.parametrize("arguments", [{}, {"attention_backend": "torch"}], ids=["auto", "picked"])
def test_explain_reports_unknown_if_the_model_constructor_reads_tensor_values(
    tmp_path, arguments, capsys
):
    model = write_tiny_llama(tmp_path, architectures=["ReadsValues"])
    options = {**SMALL_ENGINE, "load_format": "dummy", "skip_tokenizer_init": True, **arguments}
    explained = explain_choice("attention", EngineArgs(model=model, **options))
    assert not explained.error and not explained.chosen
    unknown = [verdict.name for verdict in explained.verdicts if verdict.state == "unknown"]
    assert unknown == [engine_choice(model, options)]
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in arguments.items()]
    assert main(["plugins", "explain", "attention", "--model", str(model), *flags]) == 0
    assert "not known before an engine starts; " in capsys.readouterr().out.splitlines()[0]


def test_a_model_that_no_device_can_create_is_an_error(tmp_path):
    model = write_tiny_llama(tmp_path, architectures=["Mistaken"])
    explained = explain_choice("attention", EngineArgs(model=model, **SMALL_ENGINE))
    assert "no_such_key" in explained.error


@pytest.mark.parametrize(
    ("response", "message"),
    [("facts", "AttentionFacts"), (SystemExit(3), "SystemExit"), (MemoryError(), "MemoryError")],
)
def test_the_error_for_a_worker_with_an_invalid_description_names_the_worker(
    tmp_path, response, message
):
    from dovetail_cpu.worker import CPUWorker

    def describe_attention(context):
        if isinstance(response, BaseException):
            raise response
        return response

    odd = type("Odd", (CPUWorker,), {"describe_attention": staticmethod(describe_attention)})
    options = {**SMALL_ENGINE, "worker_cls": odd}
    args = EngineArgs(model=write_tiny_llama(tmp_path), **options)
    explained = explain_choice("attention", args)
    assert message in explained.error and "Odd" in explained.error and not explained.chosen


def test_explain_finds_requirements_that_config_json_does_not_state(write):
    explained = explain_choice("attention", EngineArgs(model=write("other names, cap")))
    assert explained.criteria.requirements.features == {"soft_cap"}
    assert (
        explained.criteria.requirements.num_heads,
        explained.criteria.requirements.head_size,
    ) == (4, 8)
