"""The example clients in Python and JavaScript, against a real server."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deployment.test_deployment_runs import KEY, configuration, free_port, serving

CLIENTS = Path(__file__).resolve().parents[2] / "examples" / "clients"
COMMANDS = {
    "python": [sys.executable, str(CLIENTS / "chat.py"), "What is 27 + 58?", "--url"],
    "javascript": ["node", str(CLIENTS / "chat.mjs"), "What is 27 + 58?"],
}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    config, port = configuration(tmp_path_factory.mktemp("clients"))
    with serving(Path(sys.executable).with_name("dovetail"), config, port):
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture(params=COMMANDS)
def client(request):
    if shutil.which(COMMANDS[request.param][0]) is None:
        pytest.skip("needs Node")

    def run(address: str, key: str):
        environment = {"DOVETAIL_API_KEY": key, "PATH": "/usr/local/bin:/usr/bin:/bin"}
        command = [*COMMANDS[request.param], address]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    return run


@pytest.mark.costly
def test_a_client_streams_a_response(client, url):
    done = client(url, KEY)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "27 + 58 = 85.\n[12 tokens]\n"


@pytest.mark.costly
def test_a_client_reports_a_rejected_key(client, url):
    done = client(url, "wrong")
    assert done.returncode == 1
    assert "401" in done.stdout + done.stderr


@pytest.mark.costly
@pytest.mark.sampled(4)
def test_a_client_reports_a_server_that_has_exited(client):
    done = client(f"http://127.0.0.1:{free_port()}/v1", KEY)
    assert done.returncode == 1
    assert "ECONNREFUSED" in done.stderr or "Connection refused" in done.stdout
