"""TLS: requests over HTTPS, certificates of clients, and files that cannot be used."""

import http.client
import json
import shutil
import ssl
import subprocess

import pytest

from dovetail.cli import main
from dovetail.errors import ConfigError
from dovetail_server.settings import ServerSettings

pytestmark = [
    pytest.mark.costly,
    pytest.mark.skipif(
        shutil.which("openssl") is None, reason="needs openssl to make certificates"
    ),
]
BODY = {"prompt": "Anna", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"


def openssl(*arguments):
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def make_certificate(folder, name):
    """Create a self-signed certificate. Return its file and the file of its key."""
    path, key = folder / f"{name}.pem", folder / f"{name}-key.pem"
    kind = ("-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2")
    openssl("req", *kind, "-addext", NAMES, "-keyout", str(key), "-out", str(path))
    return str(path), str(key)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return certificate and key of the server, and certificate and key of a client."""
    folder = tmp_path_factory.mktemp("tls")
    return *make_certificate(folder, "server"), *make_certificate(folder, "client")


@pytest.fixture(scope="module")
def encrypted(serving, files):
    """A server that serves HTTPS, for clients with a certificate."""
    created, key, client, _ = files
    options = ("--ssl-certfile", created, "--ssl-keyfile", key, "--ssl-ca-certs", client)
    with serving("--model", "demo", "--max-model-len", "128", *options) as running:
        yield running.wait_until_ready()


def client_tls_settings(files):
    """Return the TLS settings of a client that trusts the server's certificate and has its own."""
    context = ssl.create_default_context(cafile=files[0])
    context.load_cert_chain(files[2], files[3])
    return context


def ask(server, context, body=None):
    """Return the status and the content of a request over HTTPS."""
    connection = http.client.HTTPSConnection(server.host, server.port, timeout=60, context=context)
    try:
        headers = {"Content-Type": "application/json"}
        sent = None if body is None else json.dumps(body)
        path = "/version" if body is None else "/v1/completions"
        connection.request("GET" if body is None else "POST", path, sent, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_requests_over_https_are_served(encrypted, files):
    context = client_tls_settings(files)
    assert ask(encrypted, context)[0] == 200
    status, content = ask(encrypted, context, BODY)
    assert status == 200 and json.loads(content)["usage"]["completion_tokens"] == 4
    status, content = ask(encrypted, context, BODY | {"stream": True})
    assert status == 200 and content.endswith(b"data: [DONE]\n\n")
    assert encrypted.wait_for("Ready: demo on https://")


def test_a_large_request_over_https_is_served(encrypted, files):
    status, content = ask(encrypted, client_tls_settings(files), BODY | {"user": "a" * 2_000_000})
    assert status == 400 and json.loads(content)["error"]["param"] == "user"


def test_a_client_without_a_certificate_is_rejected(encrypted, files):
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
        ask(encrypted, ssl.create_default_context(cafile=files[0]))
    assert ask(encrypted, client_tls_settings(files))[0] == 200


def test_a_request_without_tls_is_not_served(encrypted, files):
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        encrypted.get("/version")
    assert ask(encrypted, client_tls_settings(files))[0] == 200


def test_old_versions_of_tls_are_rejected(encrypted, files):
    context = client_tls_settings(files)
    with pytest.warns(DeprecationWarning):
        context.minimum_version = ssl.TLSVersion.TLSv1_1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        ask(encrypted, context)


@pytest.fixture
def unusable(files, tmp_path):
    """Return paths of files that the server cannot use, by a keyword."""
    created, key, _, other = files
    locked, text = tmp_path / "locked.pem", tmp_path / "text.pem"
    openssl("rsa", "-aes256", "-passout", "pass:secret", "-in", key, "-out", str(locked))
    text.write_text("not a certificate")
    by_name = {
        "made": created,
        "key": key,
        "other": other,
        "locked": str(locked),
        "text": str(text),
    }
    return by_name | {"missing": str(tmp_path / "missing.pem"), "folder": str(tmp_path)}


@pytest.mark.parametrize(
    ("certificate", "key", "authority", "named", "reason"),
    [
        ("missing", "key", None, "missing", "--ssl-certfile"),
        ("folder", "key", None, "folder", "--ssl-certfile"),
        ("made", "missing", None, "missing", "--ssl-keyfile"),
        ("made", "other", None, "other", "key values mismatch"),
        ("text", "key", None, "text", "cannot be used: not a PEM file."),
        ("made", "text", None, "text", "cannot be used"),
        ("key", "key", None, "key", "cannot be used"),
        ("made", None, None, "made", "cannot be used"),
        ("made", "locked", None, None, "has a password"),
        ("made", "key", "missing", "missing", "--ssl-ca-certs"),
        ("made", "key", "text", "text", "--ssl-ca-certs"),
        ("made", "key", "key", "key", "--ssl-ca-certs"),
    ],
)
def test_the_startup_error_for_an_unusable_file_names_it(
    unusable, capsys, certificate, key, authority, named, reason
):
    kwargs = {"--ssl-certfile": certificate, "--ssl-keyfile": key, "--ssl-ca-certs": authority}
    options = [part for name, item in kwargs.items() if item for part in (name, unusable[item])]
    assert main(["serve", "--model", "demo", "--port", "0", *options]) == 2
    error = capsys.readouterr().err
    assert reason in error and len(error.splitlines()) <= 3
    assert named is None or unusable[named] in error


def test_a_tls_key_without_a_certificate_is_rejected():
    for name in ("ssl_keyfile", "ssl_ca_certs"):
        with pytest.raises(ConfigError, match="--ssl-certfile"):
            ServerSettings(**{name: "key.pem"})
