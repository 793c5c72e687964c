"""The results of `bench/quality.py`: the files, the tables, and runs that continue."""

import json
import math

import pytest
from quality import results, run
from quality.formats import EVERY, OFF_GRID, PUBLISHED
from quality.job import JobError
from quality.report import mean, tables
from quality.run import Run, measure_weights

SETTINGS = {
    **{"model": "m.gguf", "sha256": "0", "chunks": 1, "chunk_tokens": 8, "threads": 1},
    **{"seed": 16, "texts": {"prose": "p 1.0"}},
}
ORIGIN = {"command": "c", "commit": "abc", "date": "d", "settings": SETTINGS}
FORMATS = {item.name: item for item in EVERY}


def figures(kl, perplexity=10.0):
    same = {name: None if value is None else 0.75 for name, value in kl.items()}
    return {"perplexity": perplexity, "kl": kl, "same_best": same}


def row(name, perplexity=10.0, weights=OFF_GRID, kl=0.25):
    return {
        "weights": weights,
        "format": name,
        "engine": FORMATS[name].engine,
        "definition": results.definition(FORMATS[name]),
        "commit": "abc",
        "bytes_per_weight": 1.0,
        "texts": {"prose": figures({"float32": kl, "bf16": 0.5}, perplexity)},
    }


def result(*rows):
    return {"origin": ORIGIN, "rows": list(rows), "layers": {}, "absent": {}}


def reference(name, kl):
    return {**row(name), "texts": {"prose": figures(kl)}}


@pytest.fixture
def jobs(monkeypatch):
    """Replace the measuring processes by functions that return made-up metrics.

    Return the list of the formats that were measured.
    """
    measured = []

    def run_separately(python, job, deadline_s):
        measured.append(job["model"])
        if job["engine"] == "torch":
            raise JobError("ended by SIGSEGV: no output")
        kl = dict.fromkeys(job["references"], 0.125)
        return {"texts": {"prose": figures(kl)}, "bytes_per_weight": 2.0}

    monkeypatch.setattr(run, "run_separately", run_separately)
    monkeypatch.setattr(run, "model_path", lambda item, *rest: item.name)
    monkeypatch.setattr(run, "write_reference", lambda source, folder, off_grid: folder)
    monkeypatch.setattr(run, "_num_weights", lambda directory: 1)
    return measured


def new_run(folder, **fields):
    pythons = {"dovetail": "python", "torch": "python"}
    origin = {**ORIGIN, "commit": "new"}
    created = Run(folder=folder, out=folder, source=folder, pythons=pythons, threads=1, **fields)
    created.origin = origin
    return created


def chosen(*names):
    return [FORMATS[name] for name in names]


@pytest.mark.costly
def test_the_results_file_is_strict_json_and_unknown_divergences_are_null(tmp_path):
    rows = [reference("float32", {}), reference("bf16", {"float32": 0.001})]
    results.write(result(*results.complete(rows)), tmp_path)

    def reject(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = (tmp_path / "quality.json").read_text()
    first, second = json.loads(text, parse_constant=reject)["rows"]
    assert first["texts"]["prose"]["kl"] == {"float32": 0.0, "bf16": None}
    assert second["texts"]["prose"]["kl"] == {"float32": 0.001, "bf16": 0.0}
    assert second["texts"]["prose"]["same_best"]["bf16"] == 1.0
    assert mean(first, "kl", "bf16") is None
    assert "nan" not in (tmp_path / "quality.md").read_text().lower()
    with pytest.raises(ValueError, match="not JSON compliant"):
        results.write(result(row("int8", perplexity=math.inf)), tmp_path)
    assert (tmp_path / "quality.json").read_text() == text


@pytest.mark.costly
def test_results_are_written_after_each_format(jobs, tmp_path):
    measure_weights(new_run(tmp_path), OFF_GRID, chosen("float32", "bf16", "int8"))
    assert jobs == ["float32", "bf16", "int8"]
    rows = json.loads((tmp_path / "quality.json").read_text())["rows"]
    assert [item["format"] for item in rows] == jobs
    assert rows[2]["texts"]["prose"]["kl"] == {"float32": 0.125, "bf16": 0.125}


@pytest.mark.costly
def test_a_run_is_continued_with_the_missing_formats_and_new_references(jobs, tmp_path):
    formats = chosen("float32", "bf16", "int8", "int4")
    kept = [row("float32"), row("bf16"), row("int8", kl=0.5)]
    going = new_run(tmp_path, rows=kept)
    measure_weights(going, OFF_GRID, formats)
    assert jobs == ["float32", "bf16", "int4"]
    assert [(item["format"], item["commit"]) for item in going.rows] == [
        *(("float32", "new"), ("bf16", "new"), ("int8", "abc"), ("int4", "new"))
    ]
    jobs.clear()
    measure_weights(going, OFF_GRID, formats)
    assert jobs == []


@pytest.mark.costly
def test_a_format_with_a_different_definition_is_measured_again(jobs, tmp_path):
    changed = row("int8")
    changed["definition"]["options"] = {"dtype": "float16"}
    going = new_run(tmp_path, rows=[row("float32"), row("bf16"), changed])
    measure_weights(going, OFF_GRID, chosen("float32", "bf16", "int8"))
    assert "int8" in jobs


@pytest.mark.costly
def test_a_format_that_fails_is_reported_and_the_next_formats_are_measured(jobs, tmp_path):
    names = ("float32", "bf16", "llama.cpp Q4_0", "torch dynamic int8", "KV cache int8")
    going = new_run(tmp_path)
    measure_weights(going, OFF_GRID, chosen(*names))
    assert going.absent == {
        "llama.cpp Q4_0, off grid": "no Python interpreter for llamacpp was given",
        "torch dynamic int8, off grid": "ended by SIGSEGV: no output",
    }
    assert jobs[-1] == "KV cache int8"


def test_results_of_an_earlier_run_are_kept_if_the_settings_are_equal(tmp_path):
    assert results.earlier(tmp_path, SETTINGS) == results.Earlier()
    results.write({**result(row("bf16")), "layers": {"mean": {"int8": 0.5}}}, tmp_path)
    kept = results.earlier(tmp_path, SETTINGS)
    assert [item["format"] for item in kept.rows] == ["bf16"] and kept.layers["mean"] == {
        "int8": 0.5
    }
    assert results.finished(kept.rows, OFF_GRID, FORMATS["bf16"])
    assert not results.finished(kept.rows, PUBLISHED, FORMATS["bf16"])
    with pytest.raises(results.ResultsError, match="different settings: chunks, seed; use another"):
        results.earlier(tmp_path, {**SETTINGS, "chunks": 2, "seed": 17})


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"origin": {"settings": {}}, "rows": 3}'],
)
def test_the_error_for_a_damaged_results_file_names_it(content, tmp_path):
    (tmp_path / "quality.json").write_bytes(content)
    with pytest.raises(results.ResultsError, match=r"quality\.json is not a result of quality\.py"):
        results.earlier(tmp_path, SETTINGS)


def test_the_error_for_a_row_with_a_missing_metric_names_the_metric(tmp_path):
    damaged = row("bf16")
    del damaged["texts"]["prose"]["kl"]
    (tmp_path / "quality.json").write_text(json.dumps(result(damaged)))
    with pytest.raises(results.ResultsError, match="kl"):
        results.earlier(tmp_path, SETTINGS)


def test_each_format_is_measured_only_for_the_references_it_supports():
    assert not FORMATS["GGUF file"].is_for(OFF_GRID) and FORMATS["GGUF file"].is_for(PUBLISHED)
    assert FORMATS["q4_k, gptq"].is_for(OFF_GRID) and not FORMATS["q4_k, gptq"].is_for(PUBLISHED)
    for name in ("int8", "llama.cpp Q4_0", "OpenVINO int4"):
        assert FORMATS[name].is_for(OFF_GRID) and FORMATS[name].is_for(PUBLISHED)


def test_the_tables_show_the_change_of_perplexity_relative_to_bf16():
    rows = [row("bf16", 10.0), row("int8", 10.5)]
    by_name = {
        **result(*rows),
        "layers": {"mean": {"int8": 0.0125}},
        "absent": {"plot": "no matplotlib"},
    }
    document = tables(by_name)
    assert "| int8 | 10.500 (+5.00%) |" in document
    assert "| int8 | 1.000 | 0.2500 | 0.2500 | 0.5000 | 75.00% |" in document
    assert "| mean | 0.0125 |" in document and "- plot: no matplotlib" in document
    assert "commit abc" in document
