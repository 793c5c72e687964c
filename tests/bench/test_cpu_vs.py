"""`bench/cpu_vs.py` end to end, with fake engines that sleep, hang, exit or report wrong
results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOKEN_S = {"dovetail": 0.001, "slow": 0.004}
FAULTS = ("load", "hang", "die", "short")


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": [16, 8], "model.layers.0.mlp.up_proj.weight": [32, 8]}
    header = json.dumps({name: {"shape": shape} for name, shape in shapes.items()}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


@pytest.fixture
def peers_file(tmp_path):
    here = json.dumps(str(Path(__file__).parent))
    pids = tmp_path / "pids"
    pids.mkdir()
    lines = []
    for name in (*TOKEN_S, *FAULTS):
        fault = f', fault = "{name}"' if name in FAULTS else ""
        token_s, folder = TOKEN_S.get(name, 0.0), json.dumps(str(pids))
        lines += [
            f"[{name}]",
            'adapter = "fake_engine"',
            'models = { bf16 = "{checkpoint}" }',
            f"env = {{ PYTHONPATH = {here} }}",
            f"options = {{ token_s = {token_s}, pid_folder = {folder}{fault} }}",
        ]
    path = tmp_path / "peers.toml"
    path.write_text("\n".join(lines))
    return path


def run(script, *arguments, env=None):
    command = [sys.executable, str(ROOT / "bench" / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.costly
def test_working_and_failing_engines_are_compared_and_reported(checkpoint, peers_file, tmp_path):
    out, page = tmp_path / "out.json", tmp_path / "page.md"
    done = run(
        "cpu_vs.py",
        *("--model", checkpoint, "--peers-file", peers_file),
        *("--peers", ",".join(("slow", *FAULTS)), "--formats", "bf16"),
        *("--cases", "decode1,startup", "--rounds", 1, "--attempts", 1),
        *("--threads", 1, "--deadline", 2),
        *("--json", out, "--write-docs", page),
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(out.read_text())["results"]

    reasons = {(f["engine"], f["case"]): f["reason"] for f in result["failures"]}
    assert "no such model" in reasons["load", "load"]
    assert "no response" in reasons["hang", "decode1"]
    assert "the last words" in reasons["die", "decode1"]
    assert "requested" in reasons["short", "decode1"]
    assert not {"dovetail", "slow"} & {engine for engine, _ in reasons}

    turns = {(turn["engine"], turn["case"]): turn for turn in result["turns"]}
    for name, token_s in TOKEN_S.items():
        # 127 steps take at least their sleep time; other work on the machine makes them longer.
        assert 0 < turns[name, "decode1"]["value"] <= 1.5 / token_s
        assert turns[name, "startup"]["value"] > token_s
    assert turns["dovetail", "decode1"]["value"] > turns["slow", "decode1"]["value"]
    assert all(turn["probes"][0]["read_gbps"] > 0 for turn in turns.values() if "probes" in turn)

    for text in (done.stdout, page.read_text()):
        assert "| slow |" in text and "dovetail ÷ fastest other engine" in text and "(slow)" in text
    assert "## Method" in page.read_text()

    started = [int(path.name) for path in (tmp_path / "pids").iterdir()]
    assert len(started) >= len(TOKEN_S) + len(FAULTS)
    assert not [pid for pid in started if is_alive(pid)]


START = {"engine": "dovetail-again", "case": "startup"}
RUNS = [("a", "bf16"), ("a", "int8"), ("a", "bf16"), ("b", "bf16")]


def test_the_results_page_is_written_from_stored_results(tmp_path):
    """Runs on the same machine are in one section, and their rounds are numbered continuously."""
    page, files = tmp_path / "page.md", []
    for number, (processor, weights) in enumerate(RUNS):
        engine = {"engine": "dovetail", "weights": weights, "versions": {"torch": "9"}}
        turn = {"engine": "dovetail", "weights": weights, "case": "decode1", "round": 0}
        result = {
            "model": "m",
            "threads": 2,
            "rounds": 1,
            "step_bytes": {weights: 1e6},
            "engines": [engine | {"peak_rss_mib": 1000.0 + number, "first_tokens": [1]}],
            "failures": [],
            "turns": [
                turn | {"value": 10.0 + number, "disturbed": False, "probes": []},
                turn | START | {"value": 1.5, "disturbed": False, "probes": []},
            ],
        }
        run_of = {
            "machine": {"processor": processor},
            "absent": {"vllm": "no"},
            "results": [result],
        }
        files.append(tmp_path / f"run{number}.json")
        files[-1].write_text(json.dumps(run_of))
    done = run("cpu_vs.py", "--results", *files, "--write-docs", page)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert "not run: vllm (no)" in text and "torch: 9" in text
    assert text.count("## Machine") == text.count("## m,") == 2
    assert "at most 2 rounds" in text and "| dovetail | 11 (10–12) |" in text
    assert "| dovetail-again | – | 1.5 (1.5–1.5) |  |  |" in text
    assert text.index("processor: a") < text.index("### int8") < text.index("processor: b")


@pytest.mark.costly
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--formats", "fp3"), "fp3"),
        (("--cases", "decode1,sleep"), "sleep"),
        (("--peers", "nobody"), "nobody"),
        (("--results", "/no/such/file"), "/no/such/file"),
        (("--quality", "/no/such/figures"), "/no/such/figures"),
    ],
)
def test_the_error_for_an_invalid_option_names_it(arguments, word):
    done = run("cpu_vs.py", *arguments)
    assert done.returncode != 0
    assert word in done.stderr and "Traceback" not in done.stderr


@pytest.mark.costly
def test_without_vllm_the_comparison_explains_how_to_install_it():
    env = {name: value for name, value in os.environ.items() if name != "DOVETAIL_VLLM_PYTHON"}
    done = run("vs_vllm_scheduler.py", env=env)
    assert done.returncode == 2
    assert "pip install" in done.stdout and "DOVETAIL_VLLM_PYTHON" in done.stdout
