"""`bench/peers`: limits, medians, ratios, the list of engines, the line protocol."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from cases import Case
from gguf import GGMLQuantizationType
from gguf_files.models import write_model
from peers.accuracy import Accuracy, read_accuracy
from peers.child import Child, ChildError
from peers.engine_llamacpp import LlamaCppEngine
from peers.limits import MachineLimits, ModelShape, decode_seconds, prompt_seconds
from peers.page import http_section, performance_page
from peers.process_tree import CpuTime
from peers.roster import find_contenders
from peers.tables import markdown, medians, ratio_to_best, share_of_limit
from safetensors.numpy import load_file

from end_to_end.checkpoints import make_checkpoint

HERE = str(Path(__file__).parent)
SHAPE = ModelShape(
    layer_weights=1000, head_weights=500, num_layers=2, num_heads=4, num_kv_heads=1, head_size=8
)


def turn(engine, number, value, disturbed=False, case="decode1", limit=None):
    return {
        "engine": engine,
        "weights": "bf16",
        "case": case,
        "round": number,
        "value": value,
        "limit": limit,
        "disturbed": disturbed,
    }


def result_of(*turns):
    engines = [
        {
            "engine": name,
            "weights": "bf16",
            "versions": {},
            "peak_rss_mib": 1,
            "first_tokens": [7, ord(name[0])],
        }
        for name in dict.fromkeys(entry["engine"] for entry in turns)
    ]
    return {
        "model": "m",
        "threads": 2,
        "rounds": 1,
        "step_bytes": {"bf16": 3e6},
        "engines": engines,
        "failures": [],
        "turns": list(turns),
    }


def test_a_token_uses_only_a_share_of_the_expert_weights():
    shape = replace(SHAPE, expert_weights=8000, expert_share=0.25)
    assert shape.token_weights == 1000 + 2000
    assert shape.step_bytes("bf16") == 2 * (1500 + 2000)
    # The second token uses a quarter of the remaining experts.
    assert shape.step_bytes("bf16", 2) == 2 * (1500 + 3500)
    assert SHAPE.step_bytes("bf16", 2) == SHAPE.step_bytes("bf16") == 2 * 1500
    limits = MachineLimits(read_bytes_s=1e12, flops_s=1e3)
    item = Case(name="one", prompt_lens=(1,), output_lens=(2,))
    assert decode_seconds(item, shape, "bf16", limits) == 2 * (3000 + 500) / 1e3


def test_the_bytes_that_a_step_reads_of_a_gguf_file_are_computed_from_its_block_type(tmp_path):
    make_checkpoint(tmp_path, hidden_size=64, intermediate_size=64, head_dim=16)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_theta": 10000.0}))
    file = write_model(tmp_path, tmp_path / "model.gguf", type_=GGMLQuantizationType.Q4_1)
    read = {
        name: tensor.shape
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
        if tensor.ndim == 2 and (name == "lm_head.weight" or ".layers." in name)
    }
    shape = ModelShape.of(file)
    assert shape.layer_weights + shape.head_weights == sum(map(math.prod, read.values()))
    assert shape.head_weights == math.prod(read["lm_head.weight"])
    assert shape.step_bytes("gguf") == sum(map(math.prod, read.values())) * 20 / 32
    sizes = (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_size)
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    assert sizes == tuple(config[name] for name in names)


def test_the_estimated_minimum_time_is_the_larger_of_memory_time_and_compute_time():
    case = Case(name="two", prompt_lens=(3, 1), output_lens=(3, 2))
    # A token in the cache is 2 × 2 bytes × 2 layers × 1 head × 8 = 64 bytes.
    steps = [(2, 3000 + 64 * (4 + 2)), (1, 3000 + 64 * 5)]
    slow_memory = MachineLimits(read_bytes_s=10.0, flops_s=1e12)
    expected = sum(num_bytes for _, num_bytes in steps) / 10.0
    assert math.isclose(decode_seconds(case, SHAPE, "bf16", slow_memory), expected)
    slow_arithmetic = MachineLimits(read_bytes_s=1e12, flops_s=10.0)
    expected = sum(2 * 1500 * running for running, _ in steps) / 10.0
    assert math.isclose(decode_seconds(case, SHAPE, "bf16", slow_arithmetic), expected)
    products = 2 * (1000 * 4 + 500 * 2) + 2 * (9 + 1) * 2 * 4 * 8
    assert math.isclose(prompt_seconds(case, SHAPE, "bf16", slow_arithmetic), products / 10.0)
    assert math.isclose(prompt_seconds(case, SHAPE, "int8", slow_memory), 1500 / 10.0)


def test_the_compute_limit_depends_on_the_weight_format():
    probes = {"read_gbps": 2.0, "bf16_gflops": 3.0, "int8_gflops": 4.0}
    assert MachineLimits.of(probes, "bf16") == MachineLimits(read_bytes_s=2e9, flops_s=3e9)
    assert MachineLimits.of(probes, "int4") == MachineLimits(read_bytes_s=2e9, flops_s=4e9)
    assert MachineLimits.of({"read_gbps": 2.0}, "bf16") is None


def test_disturbed_repetitions_count_only_if_a_round_has_no_undisturbed_one():
    result = result_of(
        turn("dovetail", 0, 1.0, disturbed=True),
        turn("dovetail", 0, 20.0),
        turn("dovetail", 1, 30.0),
        turn("peer", 0, 10.0),
        turn("peer", 1, 5.0, disturbed=True),
        turn("peer", 1, 6.0, disturbed=True),
    )
    assert medians(result, "bf16", "decode1") == {"dovetail": 25.0, "peer": 8.0}
    lines = {line.split(" | ")[0]: line for line in markdown(result).splitlines()}
    assert "25 (20–30) |" in lines["| dovetail"]
    assert "8 (6–10)* |" in lines["| peer"]
    assert lines["| peer"].endswith("| 1 of 2 |")


def test_ratios_to_the_fastest_other_engine_are_computed_per_round():
    result = result_of(
        *(turn("dovetail", n, v, limit=40.0) for n, v in enumerate((10.0, 20.0, 30.0))),
        *(turn("good", n, v) for n, v in enumerate((10.0, 10.0, 10.0))),
        *(turn("bad", n, v) for n, v in enumerate((1.0, 1.0, 90.0))),
    )
    assert ratio_to_best(result, "bf16", "decode1") == ("good", 2.0)
    assert share_of_limit(result, "bf16", "decode1", "dovetail") == 0.5
    assert share_of_limit(result, "bf16", "decode1", "good") is None
    alone = result_of(turn("dovetail", 0, 1.0), turn("dovetail-cold", 0, 9.0))
    assert ratio_to_best(alone, "bf16", "decode1") is None


def accuracy(**kl_by_engine):
    figures = {(name, "int4"): value for name, value in kl_by_engine.items()}
    return Accuracy(kl=figures, origin="made")


def in_int4(*turns):
    result = result_of(*({**entry, "weights": "int4"} for entry in turns))
    result["engines"] = [{**engine, "weights": "int4"} for engine in result["engines"]]
    return {**result, "step_bytes": {"int4": 3e6}}


def test_only_engines_with_sufficient_accuracy_are_included_in_ratios():
    result = in_int4(
        turn("dovetail", 0, 60.0), turn("fast", 0, 40.0), turn("exact", 0, 30.0), turn("new", 0, 50)
    )
    limits = accuracy(dovetail=0.4, fast=0.501, exact=0.5)
    assert ratio_to_best(result, "int4", "decode1") == ("new", 1.2)
    assert ratio_to_best(result, "int4", "decode1", limits) == ("exact", 2.0)
    lines = {line.split(" | ")[0]: line for line in markdown(result, limits).splitlines()}
    assert "**2.00×** (exact)" in lines["| **dovetail ÷ fastest engine that counts**"]
    assert "**1.20×** (new)" in lines["| **dovetail ÷ fastest other engine**"]
    assert lines["| fast"].endswith("| 0.5010 (does not count) |")
    assert lines["| exact"].endswith("| 0.5000 |") and lines["| dovetail"].endswith("| 0.4000 |")
    assert lines["| new"].endswith("| – (does not count) |")
    columns = {line.count("|") for line in lines.values() if line.startswith("|")}
    assert len(columns) == 1


def test_if_the_accuracy_of_dovetail_is_unknown_ratios_include_only_bf16_engines():
    result = in_int4(turn("dovetail", 0, 60.0), turn("exact", 0, 30.0))
    assert ratio_to_best(result, "int4", "decode1", accuracy(exact=0.5)) is None
    plain = result_of(turn("dovetail", 0, 60.0), turn("exact", 0, 30.0))
    assert ratio_to_best(plain, "bf16", "decode1", accuracy()) == ("exact", 2.0)


def test_tables_omit_the_accuracy_matched_ratio_when_no_accuracy_is_measured():
    text = markdown(result_of(turn("dovetail", 0, 60.0), turn("exact", 0, 30.0)))
    assert "that counts" not in text and "KL" not in text


def quality_file(folder, names):
    texts = {"a": {"perplexity": 9.0, "kl": {"float32": 0.1}, "same_best": {"float32": 0.9}}}
    texts["b"] = {**texts["a"], "kl": {"float32": 0.3}}
    rows = [
        {
            **{"weights": weights, "format": name, "engine": "e", "definition": {}, "commit": "c"},
            **{"bytes_per_weight": 1.0, "texts": texts if weights == "off grid" else {}},
        }
        for name in names
        for weights in ("off grid", "published")
    ]
    settings = {"model": "m.gguf", "chunks": 2, "chunk_tokens": 1024}
    origin = {"commit": "c", "settings": settings}
    path = folder / "quality.json"
    path.write_text(json.dumps({"origin": origin, "rows": rows, "layers": {}}))
    return path


def test_accuracy_is_the_mean_over_all_texts_with_noisy_reference_weights(tmp_path):
    path = quality_file(tmp_path, ["int8", "int4", "OpenVINO int4"])
    actual = read_accuracy(path)
    assert set(actual.kl) == {("dovetail", "int8"), ("dovetail", "int4"), ("openvino", "int4")}
    assert actual.kl["openvino", "int4"] == pytest.approx(0.2)
    assert actual.counts("openvino", "int4") and not actual.counts("llamacpp", "int4")
    assert "2,048 tokens per text, commit c" in actual.origin
    page = performance_page([], accuracy=actual)
    assert "at\n  most 1.25 ×" in page and actual.origin in page


def test_regenerating_the_page_keeps_the_http_section():
    page = performance_page([])
    assert http_section(page) == ""
    section = "\n## Through HTTP\n\nfigures\n"
    assert http_section(page + section) == section


def test_an_accuracy_file_without_results_of_dovetail_is_rejected(tmp_path):
    path = quality_file(tmp_path, ["int8", "llama.cpp Q4_0"])
    with pytest.raises(ValueError, match="has no accuracy of Dovetail for int4"):
        read_accuracy(path)


def test_the_report_orders_engines_by_startup_time():
    result = result_of(*(turn(name, 0, v, case="startup") for name, v in (("a", 3.0), ("b", 1.0))))
    assert list(medians(result, "bf16", "startup")) == ["b", "a"]


def test_cpu_time_of_other_processes_and_steal_time_count_as_lost():
    begin = CpuTime(busy=1000, own=200, stolen=10)
    end = CpuTime(busy=1300, own=450, stolen=15)
    assert math.isclose(end.lost_since(begin), (50 + 5) / 100)
    assert begin.lost_since(begin) == 0.0


def test_the_compared_engines_are_read_from_the_file_and_the_environment(tmp_path):
    (tmp_path / "m-bf16").touch()
    file = tmp_path / "peers.toml"
    file.write_text(
        f'[other]\nadapter = "x"\nmodels = {{ bf16 = "{tmp_path}/{{name}}-bf16" }}\n'
        '[vllm]\npython = "/no/such/python"\n'
        '[dovetail-cold]\nadapter = "peers.engine_dovetail"\n[stray]\npython = "x"\n'
    )
    environ = {"DOVETAIL_PEERS": str(file), "DOVETAIL_PEER_OTHER_INT8": "/no/such/file"}
    discovered, absent = find_contenders("auto", None, environ)
    by_name = {contender.name: contender for contender in discovered}
    assert discovered[0].name == "dovetail" and discovered[0].python == sys.executable
    assert "vllm" in absent and "vllm" not in by_name
    assert "adapter" in absent["stray"] and "model" in absent["ikllamacpp"]
    assert by_name["dovetail-cold"].models == discovered[0].models
    other = by_name["other"]
    assert other.model_for(Path("/somewhere/m"), "bf16") == f"{tmp_path}/m-bf16"
    assert other.model_for(Path("/somewhere/m"), "int8") is None
    with pytest.raises(ValueError, match="nobody"):
        find_contenders("nobody", None, {})


@pytest.mark.parametrize("handle", [1, None])
def test_llama_cpp_loads_the_backend_of_its_options_before_the_model(monkeypatch, handle):
    loaded = []

    def ggml_backend_load(path):
        loaded.append(path)
        return handle

    library = SimpleNamespace(ggml_backend_load=ggml_backend_load)
    native = SimpleNamespace(_lib=library)  # the first call after this one fails
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(llama_cpp=native))
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_cpp", native)
    options = {"backend": "/llama/libggml-cpu-haswell.so"}
    expected = (AttributeError, "params") if handle else (RuntimeError, "haswell")
    with pytest.raises(expected[0], match=expected[1]):
        LlamaCppEngine().load("m.gguf", "int8", 2, options)
    assert loaded == [b"/llama/libggml-cpu-haswell.so"]


def test_an_engine_process_continues_after_an_error_but_not_after_a_missed_deadline():
    child = Child(sys.executable, "fake_engine", {"PYTHONPATH": HERE})
    load = {"model": "m", "weights": "bf16", "threads": 1}
    generate = {"prompts": [[1]], "output_lens": [1]}
    try:
        with pytest.raises(ChildError, match="no such model"):
            child.ask("load", 20, **load, options={"fault": "load"})
        with pytest.raises(ChildError, match="KeyError"):
            child.ask("unheard", 20)
        assert child.ask("load", 20, **load, options={"token_s": 0.0})["versions"] == {"fake": "1"}
        assert child.ask("generate", 20, **generate)["seconds"] >= 0.0
        child.ask("load", 20, **load, options={"token_s": 30.0})
        with pytest.raises(ChildError, match="no response"):
            child.ask("generate", 0.2, **generate)
    finally:
        child.close()
