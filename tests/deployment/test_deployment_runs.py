"""The commands of the Dockerfile install a server that serves, and nginx forwards its streams."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KEY = "a-secret-key"
INSTALL_S, START_S = 1800, 120
CHAT = {
    "messages": [{"role": "user", "content": "What is 27 + 58?"}],
    "temperature": 0,
    "max_tokens": 32,
    "stream": True,
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def configuration(folder: Path, **changed: object) -> tuple[Path, int]:
    """Write deploy/serve.yaml for the demo model. Return the file and the port."""
    (folder / "keys").write_text(f"{KEY}\n")
    port = free_port()
    options = yaml.safe_load((DEPLOY / "serve.yaml").read_text("utf-8"))
    options |= {"model": "demo", "port": port, "host": "127.0.0.1", **changed}
    options["api-key-file"] = str(folder / "keys")
    (folder / "serve.yaml").write_text(yaml.safe_dump(options))
    return folder / "serve.yaml", port


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@contextmanager
def serving(program: Path, config: Path, port: int):
    """Run the server until the end of the block. Yield the process when it is ready."""
    process = subprocess.Popen([str(program), "serve", "--config", str(config)])
    try:
        limit_s = time.monotonic() + START_S
        while status(f"http://127.0.0.1:{port}/ready") != 200:
            assert process.poll() is None and time.monotonic() < limit_s
            time.sleep(0.2)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def chat(url: str, context: ssl.SSLContext | None = None) -> tuple[str, list[float]]:
    """Return the streamed text and the arrival times of the events, in s."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(CHAT).encode(), headers)
    text, times = "", []
    with urllib.request.urlopen(request, timeout=60, context=context) as response:
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                text += event["choices"][0]["delta"].get("content") or ""
                times.append(time.monotonic())
    return text, times


def test_a_server_with_the_deployed_options_serves_and_drains(tmp_path):
    config, port = configuration(tmp_path)
    with serving(Path(sys.executable).with_name("dovetail"), config, port) as process:
        assert status(f"http://127.0.0.1:{port}/metrics") == 401
        assert status(f"http://127.0.0.1:{port}/live") == 200
        text, _ = chat(f"http://127.0.0.1:{port}/v1/chat/completions")
        assert "85" in text
    assert process.returncode == 0


@pytest.mark.soak
@pytest.mark.timeout(3 * INSTALL_S)
def test_the_commands_of_the_image_install_a_server(tmp_path):
    files = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    source, environment = tmp_path / "src", tmp_path / "environment"
    source.mkdir()
    subprocess.run(["tar", "x", "-C", str(source)], input=files.stdout, check=True)
    text = (DEPLOY / "Dockerfile").read_text("utf-8").split("\nFROM ")[1]
    commands = re.findall(r"^RUN (python -m venv|pip install)(.*)$", text, re.MULTILINE)
    assert [command for command, _ in commands] == ["python -m venv", "pip install", "pip install"]
    variables = os.environ | {"PATH": f"{environment}/bin:{os.environ['PATH']}"}
    for command, arguments in commands:
        line = f"{command}{arguments}".replace("/usr/local/dovetail", str(environment))
        done = subprocess.run(
            ["sh", "-c", line.replace("python -m venv", f"{sys.executable} -m venv")],
            cwd=source,
            env=variables,
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
        )
        assert done.returncode == 0, done.stderr[-2000:]
    config, port = configuration(tmp_path)
    with serving(environment / "bin" / "dovetail", config, port) as process:
        assert "85" in chat(f"http://127.0.0.1:{port}/v1/chat/completions")[0]
    assert process.returncode == 0


@contextmanager
def proxy(folder: Path, backend_port: int):
    """Run nginx with deploy/nginx.conf and a new certificate. Yield its port."""
    port, key, certificate = free_port(), folder / "llm.key", folder / "llm.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *files, *subject]
    subprocess.run(command, check=True, capture_output=True)
    block = (DEPLOY / "nginx.conf").read_text("utf-8")
    for old, new in {
        "listen 443": f"listen 127.0.0.1:{port}",
        "llm.example.org": "localhost",
        "/etc/ssl/llm.pem": str(certificate),
        "/etc/ssl/llm.key": str(key),
        "127.0.0.1:8000": f"127.0.0.1:{backend_port}",
    }.items():
        assert old in block
        block = block.replace(old, new)
    paths = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{name}_temp_path {folder}/{name};\n" for name in paths)
    main = f"daemon off; pid {folder}/pid; error_log stderr; events {{}}\n"
    config = folder / "nginx.conf"
    config.write_text(f"{main}http {{ access_log off;\n{temporary}{block}}}\n")
    process = subprocess.Popen(["nginx", "-c", str(config), "-p", str(folder)])
    try:
        yield port
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")
def test_nginx_forwards_streams_over_tls(tmp_path):
    config, backend = configuration(tmp_path, **{"allowed-host": ["localhost"]})
    program = Path(sys.executable).with_name("dovetail")
    with serving(program, config, backend), proxy(tmp_path, backend) as port:
        context = ssl.create_default_context(cafile=str(tmp_path / "llm.pem"))
        deadline_s = time.monotonic() + 10
        while True:
            try:
                url = f"https://localhost:{port}/v1/chat/completions"
                text, times = chat(url, context)
                break
            except urllib.error.URLError:
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
        assert "85" in text and len(set(times)) > 1
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"https://localhost:{port}/metrics", context=context)
