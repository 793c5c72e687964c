"""The load generator is fast enough to measure fast servers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.clock
def test_the_client_sends_a_thousand_requests_per_second_to_a_null_server(run, tmp_path):
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("null_server.py")), "16"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        path = tmp_path / "result.json"
        port = server.stdout.readline().strip()
        options = ("--request-rate", "inf", "--concurrency", "64", "--num-prompts", "3000")
        words = ("--url", f"127.0.0.1:{port}", "--json", path, "--output-len", "16", *options)
        code, text, _ = run("bench", "serve", *words)
        server.stdin.close()
    (point,) = json.loads(path.read_text())["points"]
    assert code == 0 and point["num_ok"] == 3000
    assert point["requests_per_s"] >= 1000, text
