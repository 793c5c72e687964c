"""Other programs work with the server: clients and agents in Python and JavaScript, schemathesis.

Each is installed once in a cache outside of the tree: $DOVETAIL_TEST_CLIENTS, or the directory
dovetail-test-clients in the user's cache. Without the program, Node or a network the test is
skipped, with the reason; with `DOVETAIL_REQUIRE_DOWNLOADS=1` it fails instead.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
import venv
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak

INSTALL_S, RUN_S = 900, 120
SCHEMATHESIS_S = 300
UNSUITED_CHECKS = ("positive_data_acceptance",)
"""A document cannot state the vocabulary, the model's length and which fields contradict others."""
REQUIRE_DOWNLOADS = "DOVETAIL_REQUIRE_DOWNLOADS"
CACHE = "DOVETAIL_TEST_CLIENTS"
COMPLETE = "complete"
"""The file in a directory of the cache that states that the installation has succeeded."""
PROGRAMS = Path(__file__).with_name("programs")
PYTHON = {
    "anthropic": ("anthropic==2.14.0",),
    "instructor": ("instructor==1.17.0",),
    "langchain": ("langchain-openai==1.7.4",),
    "litellm": ("litellm==1.110.2",),
    "openai_agents": ("openai-agents==0.24.0", "openai==3.57.0"),
    "openai_responses": ("openai==3.57.0",),
    "pydantic_ai": ("pydantic-ai-slim[openai]==2.68.0",),
}
JAVASCRIPT = {
    "ai_sdk": (
        "ai@6.0.325",
        "@ai-sdk/anthropic@3.0.140",
        "@ai-sdk/openai@3.0.141",
        "@ai-sdk/openai-compatible@2.0.92",
        "zod@4.6.7",
    ),
    "openai": ("openai@6.30.1",),
}
"""The packages of each program in the directory `programs`. These versions run on Node 20."""
SCHEMATHESIS = ("schemathesis==4.32.5",)


@pytest.fixture(scope="module")
def address():
    """Run a server with the demo model, and yield its address."""
    program = str(Path(sys.executable).with_name("dovetail"))
    options = ("--model", "demo", "--max-model-len", "512", "--port", "0")
    process = subprocess.Popen([program, "serve", *options], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    ready = map(re.compile(r"(http://\S+:\d+)/v1").search, process.stderr)
    try:
        yield next(filter(None, ready))[1]
    finally:
        process.terminate()
        process.communicate(timeout=60)


def give_up(reason):
    if os.environ.get(REQUIRE_DOWNLOADS):
        raise AssertionError(reason)
    pytest.skip(reason)


def cache():
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(CACHE) or Path(base) / "dovetail-test-clients")


@contextmanager
def installation(packages):
    """Yield a new directory for the packages, or that of an earlier run. Remove it after an error.

    Test processes that need the same packages wait for each other.
    """
    key = sha256("\n".join((sys.version, *packages)).encode()).hexdigest()[:16]
    folder = cache() / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / COMPLETE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        yield folder
        (folder / COMPLETE).touch()


def run_installer(packages, folder, *command):
    """Run a package manager. Skip the test with the reason if it fails."""
    name = f"{', '.join(packages)} cannot be installed"
    try:
        completed = subprocess.run(
            [*command, *packages],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        give_up(f"{name}: {error}")
    if completed.returncode:
        give_up(f"{name}: {completed.stderr.strip()[-300:]}")


def python_with(packages):
    """Return the interpreter of a virtual environment with the packages."""
    with installation(packages) as folder:
        python = folder / "bin" / "python"
        if not (folder / COMPLETE).exists():
            venv.create(folder, with_pip=True)
            run_installer(packages, folder, python, "-m", "pip", "install", "-q")
    return python


def modules_with(packages):
    """Return the directory node_modules with the packages."""
    if shutil.which("node") is None:
        give_up("needs Node")
    with installation(packages) as folder:
        if not (folder / COMPLETE).exists():
            quiet = ("--no-audit", "--no-fund", "--silent")
            run_installer(packages, folder, "npm", "install", "--prefix", folder, *quiet)
    return folder / "node_modules"


def check_program(address, *command):
    completed = subprocess.run(
        [*command, f"{address}/v1"], capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert completed.returncode == 0 and completed.stdout.endswith("done\n"), completed.stderr


@pytest.mark.timeout(INSTALL_S + RUN_S)
@pytest.mark.parametrize("name", PYTHON)
def test_a_python_client_works_unchanged(address, name):
    check_program(address, python_with(PYTHON[name]), PROGRAMS / f"use_{name}.py")


@pytest.mark.timeout(INSTALL_S + RUN_S)
@pytest.mark.parametrize("name", JAVASCRIPT)
def test_a_javascript_client_works_unchanged(address, tmp_path, name):
    (tmp_path / "node_modules").symlink_to(modules_with(JAVASCRIPT[name]))
    program = tmp_path / "client.mjs"  # Node searches packages in the directory of the program
    program.write_text((PROGRAMS / f"use_{name}.mjs").read_text("utf-8"), "utf-8")
    check_program(address, "node", program)


def test_every_client_program_is_tested():
    named = {f"use_{name}.py" for name in PYTHON} | {f"use_{name}.mjs" for name in JAVASCRIPT}
    assert {path.name for path in PROGRAMS.iterdir() if path.suffix in (".py", ".mjs")} == named


def completion(address):
    body = json.dumps({"prompt": "Anna", "temperature": 0, "max_tokens": 8}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=RUN_S) as response:
        return json.load(response)["choices"]


@pytest.mark.timeout(INSTALL_S + 2 * SCHEMATHESIS_S)
def test_schemathesis_finds_no_failure(address, tmp_path):
    """Valid and invalid requests, from the OpenAPI document of the server."""
    program = python_with(SCHEMATHESIS).with_name("schemathesis")
    expected = completion(address)
    command = [
        *(program, "run", f"{address}/openapi.json"),
        *("--checks", "all", "--exclude-checks", ",".join(UNSUITED_CHECKS)),
        *("--phases", "coverage,fuzzing", "--mode", "all", "--continue-on-failure"),
        *("--max-examples", "250", "--max-time", str(SCHEMATHESIS_S), "--seed", "1"),
    ]
    completed = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=2 * SCHEMATHESIS_S,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout[-5000:]
    assert completion(address) == expected
