"""The files in deploy/ agree with the server: options, probes, ports, time limits and metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from dovetail.cli.app import main

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
NOT_RUN = ("Dockerfile", "compose.yaml", "kubernetes.yaml", "dovetail.service")
PAGE = ROOT / "docs" / "production.md"


def documents(name: str) -> dict[str, dict]:
    """Return the documents of a file, by kind."""
    listed = yaml.safe_load_all((DEPLOY / name).read_text("utf-8"))
    return {document["kind"]: document for document in listed}


@pytest.fixture
def kubernetes():
    return documents("kubernetes.yaml")


@pytest.fixture
def container(kubernetes):
    (result,) = kubernetes["Deployment"]["spec"]["template"]["spec"]["containers"]
    return result


def public_paths() -> set[str]:
    """Return the paths of the server's GET routes that need no key."""
    table = pytest.importorskip("dovetail_server.routes.table")
    status = pytest.importorskip("dovetail_server.routes.status")
    routes = status.status_routes(Mock())
    return {
        route.path
        for route in routes
        if route.method == "GET" and route.access is table.Access.PUBLIC
    }


def options(text: str) -> dict:
    loaded = yaml.safe_load(text)
    assert isinstance(loaded, dict)
    return loaded


CONFIGS = {
    "serve.yaml": lambda: (DEPLOY / "serve.yaml").read_text("utf-8"),
    "kubernetes.yaml": lambda: documents("kubernetes.yaml")["ConfigMap"]["data"]["serve.yaml"],
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_server_accepts_the_options_of_the_deployment_files(name, tmp_path, capsys):
    file, keys = tmp_path / "serve.yaml", tmp_path / "keys"
    keys.write_text("a-secret-key\n")
    provided = options(CONFIGS[name]()) | {"model": "demo", "api-key-file": str(keys)}
    file.write_text(yaml.safe_dump(provided))
    assert main(["config", "show", "--config", str(file), "--command", "serve"]) == 0
    assert "drain-timeout-s" in capsys.readouterr().out.replace("_", "-")

    file.write_text(yaml.safe_dump(provided | {"drain-timeout": 1}))
    assert main(["config", "show", "--config", str(file), "--command", "serve"]) != 0


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_a_probe_calls_a_route_that_needs_no_key(container, probe):
    assert container[probe]["httpGet"]["path"] in public_paths()


def test_the_ports_in_the_deployment_files_agree(container, kubernetes):
    port = options(CONFIGS["kubernetes.yaml"]())["port"]
    assert [entry["containerPort"] for entry in container["ports"]] == [port]
    assert [entry["targetPort"] for entry in kubernetes["Service"]["spec"]["ports"]] == ["http"]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    assert compose["services"]["dovetail"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert f"EXPOSE {port}\n" in (DEPLOY / "Dockerfile").read_text("utf-8")
    assert f"127.0.0.1:{port};" in (DEPLOY / "nginx.conf").read_text("utf-8")


def test_every_process_manager_waits_until_the_server_has_drained(kubernetes, container):
    drain_s = options(CONFIGS["serve.yaml"]())["drain-timeout-s"]
    pod = kubernetes["Deployment"]["spec"]["template"]["spec"]
    pre_stop_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > drain_s + pre_stop_s
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    assert float(compose["services"]["dovetail"]["stop_grace_period"].rstrip("s")) > drain_s
    unit = (DEPLOY / "dovetail.service").read_text("utf-8")
    assert float(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[0]) > drain_s
    timeout_s = options(CONFIGS["serve.yaml"]())["request-timeout-s"]
    nginx = (DEPLOY / "nginx.conf").read_text("utf-8")
    assert float(re.findall(r"proxy_read_timeout (\d+)s;", nginx)[0]) > timeout_s


def test_the_mounted_files_are_those_that_the_options_name(kubernetes, container):
    provided = options(CONFIGS["kubernetes.yaml"]())
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["args"][1] in mounts
    assert str(Path(provided["api-key-file"]).parent) in mounts
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"]["dovetail"]
    provided = options(CONFIGS["serve.yaml"]())
    assert [secret["target"] for secret in compose["secrets"]] == [provided["api-key-file"]]
    assert any(volume.endswith(":/etc/dovetail/serve.yaml:ro") for volume in compose["volumes"])


@pytest.mark.parametrize("name", [".gitignore", ".dockerignore"])
def test_the_key_file_is_neither_committed_nor_copied_into_the_image(name):
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    keys = (DEPLOY / compose["secrets"]["keys"]["file"]).relative_to(ROOT).as_posix()
    ignored = (ROOT / name).read_text("utf-8").splitlines()
    assert keys in {entry.removeprefix("/") for entry in ignored}


def test_the_alerts_use_metrics_of_the_server():
    page = (ROOT / "docs" / "observability.md").read_text("utf-8")
    known = set(re.findall(r"`(dovetail_\w+)`", page))
    rules = yaml.safe_load((DEPLOY / "prometheus_rules.yaml").read_text("utf-8"))
    (group,) = rules["groups"]
    for rule in group["rules"]:
        used = set(re.findall(r"\bdovetail_\w+", rule["expr"]))
        assert {name.removesuffix("_bucket") for name in used} <= known, rule["alert"]
        assert f"`{rule['alert']}`" in PAGE.read_text("utf-8")


@pytest.mark.parametrize("name", NOT_RUN)
def test_untested_deployment_files_are_marked_as_untested(name):
    head = (DEPLOY / name).read_text("utf-8")[:500].lower()
    assert re.search(r"\bnever (built|run|applied|started) here\b", head.replace("was ", ""))


def test_the_health_check_of_the_image_calls_a_route_of_the_server():
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    ((_, path),) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", text)
    assert path in public_paths()
    (command,) = re.findall(r"^ {4}CMD (\[.*\])$", text, re.MULTILINE)
    compile(json.loads(command)[2], "health check", "exec")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path):
    unit = (DEPLOY / "dovetail.service").read_text("utf-8")
    program = Path(sys.executable).with_name("dovetail")
    copy = tmp_path / "dovetail.service"
    copy.write_text(unit.replace("/usr/local/dovetail/bin/dovetail", str(program)), "utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.strip()) == (0, "")
