"""Tests of the doctor's checks."""

from __future__ import annotations

import sys
from collections import namedtuple

import pytest

from dovetail.machine import Cores
from dovetail.plugins import KINDS, PluginRegistry
from dovetail.plugins.contracts.checks import contract_version
from dovetail_devkit.doctor import BROKEN, NOTE, OK, WARNING, examine
from dovetail_devkit.doctor import devices as devices_module
from dovetail_devkit.doctor import surroundings as surroundings_module
from dovetail_devkit.doctor.devices import check_devices, verified_findings
from dovetail_devkit.doctor.path_files import check_path_files, site_folders
from dovetail_devkit.doctor.registrations import check_registrations, plugins_to_try
from dovetail_devkit.doctor.surroundings import check_environment, check_machine
from dovetail_devkit.doctor.trial_findings import check_trial
from dovetail_devkit.doctor.trial_run import Trial, try_plugins

POLICY = "from dovetail.interfaces import Policy\n\nclass Mine(Policy):\n    pass\n"
DEADLINE_S = 6.0


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a distribution with one policy, `name`. Its package contains `source`."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(distribution, name, source=POLICY, *, manifest="", kind="policy"):
        package = f"doctor_{distribution.replace('-', '_')}"
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(source)
        if manifest:
            (tmp_path / package / "dovetail.toml").write_text(manifest)
        info = tmp_path / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        )
        (info / "entry_points.txt").write_text(f"[dovetail.{kind}]\n{name} = {package}:Mine\n")

    yield make
    for name in [name for name in sys.modules if name.startswith("doctor_")]:
        del sys.modules[name]


def entry(name, **values):
    lines = [f"{key} = {value!r}".replace("'", '"') for key, value in values.items()]
    return "\n".join(["[[plugin]]", 'kind = "policy"', f'name = "{name}"', *lines, ""])


def find(findings, subject):
    return [finding for finding in findings if subject in finding.subject]


# --- loading plugins in processes -------------------------------------------------------------

HANG = "import threading\nthreading.Event().wait()\n"
ORPHAN = "import os, time\nif os.fork() == 0:\n    time.sleep(60)\nos._exit(5)\n"
FAULTS = {
    "ends": "import os\nos.write(1, b'farewell')\nos._exit(3)\n",
    "hangs": f"import os\nos.write(2, b'one moment')\n{HANG}",
    "raises": "raise KeyError('lost')\n",
    "leaves": "raise SystemExit(0)\n",
    "noisy": f"import os\nos.write(1, b'hello from below')\n{POLICY}",
    "slow": f"import time\ntime.sleep(1.1)\n{POLICY}",
    "orphan": ORPHAN,
    "killed": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    "missing": "import a_module_nobody_has\n",
    "wrong": "class Mine:\n    pass\n",
    "lingers": f"import threading, time\n{POLICY}\n"
    "threading.Thread(target=time.sleep, args=(60,)).start()\n",
    "closes": f"import os\nos.closerange(3, 99)\n{HANG}",
    "healthy": POLICY,
}


@pytest.fixture
def trials(install):
    for name, source in FAULTS.items():
        install(f"acme-{name}", name, source)
    candidates = [c for c in PluginRegistry().candidates("policy") if c.name in FAULTS]
    return {trial.plugin.name: trial for trial in try_plugins(candidates, deadline_s=DEADLINE_S)}


@pytest.mark.costly
def test_a_plugin_that_fails_to_load_is_reported_and_does_not_affect_others(trials):
    assert set(trials) == set(FAULTS)
    errors = {name: trial.error for name, trial in trials.items() if trial.error}
    assert set(errors) == set(FAULTS) - {"noisy", "slow", "lingers", "healthy"}
    assert errors["ends"] == "the process exited while it loaded the plugin (exit code 3)"
    assert errors["killed"] == "the process exited while it loaded the plugin (signal 9)"
    assert errors["orphan"] == "the process exited while it loaded the plugin (exit code 5)"
    assert errors["hangs"] == "loading the plugin did not finish within 6 s"
    assert errors["closes"] == errors["hangs"]
    assert "KeyError: 'lost'" in errors["raises"]
    assert "SystemExit" in errors["leaves"]
    assert "a_module_nobody_has" in errors["missing"]
    assert "contract of a policy" in errors["wrong"]
    assert trials["ends"].ended and trials["ends"].noise == "farewell"
    assert trials["hangs"].hung and trials["hangs"].noise == "one moment"
    assert trials["noisy"].noise == "hello from below"
    assert any("took 1." in note for note in trials["slow"].notes)
    assert not trials["healthy"].notes and not trials["healthy"].noise
    assert not [name for name in sys.modules if name.startswith("doctor_")]
    verdicts = {
        name: [finding.verdict for finding in check_trial(trial)] for name, trial in trials.items()
    }
    assert verdicts.pop("noisy") == verdicts.pop("slow") == [OK, WARNING]
    assert verdicts.pop("healthy") == verdicts.pop("lingers") == [OK]
    assert all(verdict == [BROKEN] for verdict in verdicts.values()), verdicts
    (finding,) = check_trial(trials["ends"])
    assert "'farewell'" in finding.text
    assert "--plugins-deny 'policy:ends@acme-ends'" in finding.remedy


@pytest.mark.costly
def test_after_a_plugin_that_exits_a_new_process_loads_the_remaining_plugins(
    install, count_as_member
):
    """First-party plugins are loaded in one process."""
    for letter in "abc":
        count_as_member(f"dovetail-zz-{letter}", f"doctor_dovetail_zz_{letter}")
    install("dovetail-zz-a", "first", POLICY)
    install("dovetail-zz-b", "second", FAULTS["ends"])
    install("dovetail-zz-c", "third", POLICY)
    candidates = [c for c in PluginRegistry().candidates("policy") if "-zz-" in c.distribution]
    trials = try_plugins(candidates, deadline_s=20.0)
    assert [bool(trial.error) for trial in trials] == [False, True, False]


@pytest.mark.costly
def test_an_unusable_platform_is_reported_as_a_note(install):
    source = """
from dovetail.interfaces import Platform, PlatformInfo, Probe

class Mine(Platform):
    info = PlatformInfo(name="mine", device_type="mine")
    @classmethod
    def probe(cls):
        return Probe(usable=False, reasons=("no such chip",))
    def capabilities(self):
        return frozenset({"dtype.float32"})
    def total_memory_bytes(self, local_rank=0):
        return 1
"""
    install("acme-box", "mine", source, kind="platform")
    (candidate,) = [c for c in PluginRegistry().candidates("platform") if c.name == "mine"]
    (trial,) = try_plugins([candidate], deadline_s=20.0)
    (finding,) = check_trial(trial)
    assert finding.verdict == NOTE
    assert "no such chip" in finding.text


# --- declarations of plugins ------------------------------------------------------------------


def test_valid_declarations_give_only_findings_with_the_verdict_ok():
    findings = list(check_registrations(PluginRegistry()))
    assert {finding.verdict for finding in findings} == {OK}


def test_a_plugin_name_that_two_distributions_use_is_reported_with_a_remedy(install):
    install("acme", "twin")
    install("bolt", "twin")
    (finding,) = find(check_registrations(PluginRegistry()), "policy:twin")
    assert finding.verdict == BROKEN
    assert "acme 1.0" in finding.text and "bolt 1.0" in finding.text
    assert "twin@acme or twin@bolt" in finding.remedy


def test_a_broken_manifest_is_reported_and_its_plugins_are_not_loaded(install):
    install("acme", "mine", manifest="[[plugin]]\nkind = 3\n")
    registry = PluginRegistry()
    (finding,) = [f for f in check_registrations(registry) if f.verdict == BROKEN]
    assert "acme 1.0" in finding.text and "dovetail.toml" in finding.text
    assert "mine" not in [plugin.name for plugin in plugins_to_try(registry)]


def test_an_unsupported_contract_version_is_reported_and_the_plugin_is_not_loaded(install):
    install("acme", "mine", manifest=entry("mine", api=">=7"))
    registry = PluginRegistry()
    (finding,) = find(check_registrations(registry), "policy:mine")
    assert finding.verdict == BROKEN
    assert ">=7" in finding.text and contract_version("policy") in finding.text
    assert "mine" not in [plugin.name for plugin in plugins_to_try(registry)]


def test_a_plugin_that_replaces_another_is_reported(install):
    install("acme", "mine", manifest=entry("mine", replaces=["policy:fcfs@dovetail-sched-fcfs"]))
    (finding,) = find(check_registrations(PluginRegistry()), "policy:mine")
    assert finding.verdict == NOTE
    assert "--plugins-allow 'policy:mine@acme'" in finding.remedy


def test_an_unknown_kind_is_reported_with_a_similar_kind(install):
    install("acme", "mine", kind="polcy")
    (finding,) = find(check_registrations(PluginRegistry()), "acme")
    assert finding.verdict == WARNING
    assert "Did you mean 'policy'" in finding.text


# --- .pth files -------------------------------------------------------------------------------


def pth(folder, name, text):
    (folder / name).write_text(text)


def test_pth_files_that_run_code_are_reported(tmp_path):
    pth(tmp_path, "plain.pth", "/some/folder\n# import this\n")
    pth(tmp_path, "odd.pth", "/a\nimport os; os.environ['X'] = '1'\nimport sys\n")
    pth(tmp_path, "distutils-precedence.pth", "import os; __import__('_distutils_hack')\n")
    pth(tmp_path, ".hidden.pth", "import os\n")
    findings = list(check_path_files([tmp_path]))
    assert [(f.subject, f.verdict) for f in findings] == [
        ("distutils-precedence.pth", OK),
        ("odd.pth", WARNING),
        (".pth files", OK),
    ]
    odd = findings[1]
    assert "a file of no installed package" in odd.text and "in 2 lines" in odd.text
    assert str(tmp_path / "odd.pth") in odd.remedy
    assert "1 .pth files contain only names of directories" in findings[2].text


def test_a_pth_file_with_a_known_name_and_unknown_code_is_reported(tmp_path):
    pth(tmp_path, "__editable__.good.pth", "import __editable___good_finder\n")
    pth(tmp_path, "_editable_impl_bad.pth", "import socket\n")
    verdicts = {f.subject: f.verdict for f in check_path_files([tmp_path])}
    assert verdicts["__editable__.good.pth"] == OK
    assert verdicts["_editable_impl_bad.pth"] == WARNING


def test_the_finding_for_a_pth_file_names_its_distribution(tmp_path):
    pth(tmp_path, "odd.pth", "import os\n")
    info = tmp_path / "acme-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 2.0\n")
    (info / "RECORD").write_text("odd.pth,sha256=x,10\nother.py,,\n")
    (finding,) = find(check_path_files([tmp_path]), "odd.pth")
    assert finding.text.startswith("acme 2.0 runs code")
    assert "uninstall acme" in finding.remedy


def test_the_site_directories_include_site_packages():
    assert any(folder.name in ("site-packages", "dist-packages") for folder in site_folders())


# --- machine and environment ------------------------------------------------------------------


def test_doctor_reports_findings_about_the_machine_and_the_environment():
    findings = [*check_machine(), *check_environment()]
    assert {"cores", "memory", "compiler", "device", "Python", "torch"} <= {
        finding.subject for finding in findings
    }
    assert all(finding.text for finding in findings)


@pytest.mark.parametrize(
    ("attribute", "value", "subject", "verdict"),
    [
        ("read_cores", Cores(logical=8, usable=8, quota=1.5), "cores", WARNING),
        ("read_cores", Cores(logical=8, usable=2, quota=4.0), "cores", OK),
        ("read_memory", {"total": 1 << 34, "available": 1 << 29}, "memory", WARNING),
        ("read_memory", {"total": 9, "available": 1 << 33, "limit": 1 << 20}, "memory", WARNING),
        ("read_memory", {}, "memory", NOTE),
        ("find_compilers", [], "compiler", NOTE),
        ("find_devices", [("tool", "A chip")], "device", OK),
        ("find_devices", [], "device", NOTE),
    ],
)
def test_findings_about_the_machine_have_the_expected_verdicts(
    attribute, value, subject, verdict, monkeypatch
):
    monkeypatch.setattr(surroundings_module, attribute, lambda: value)
    (finding,) = find(check_machine(), subject)
    assert finding.verdict == verdict
    assert bool(finding.remedy) == (verdict == WARNING or subject == "compiler")


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("2.13.0+cpu", OK), ("2.11.0", OK), ("2.9.1", WARNING), ("1.13", WARNING), (None, NOTE)],
)
def test_an_old_torch_version_gives_a_warning(version, verdict, monkeypatch):
    def read_version(name):
        if version is None:
            raise surroundings_module.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(surroundings_module, "version", read_version)
    (finding,) = find(check_environment(), "torch")
    assert finding.verdict == verdict


CHIP = [("chip-smi", "A chip, 80 GiB, driver 1.0")]


def accelerator_trial(install, **how):
    """Return a trial of a fake platform for accelerators, and a registry with this platform."""
    manifest = (
        '[[plugin]]\nkind = "platform"\nname = "chip"\nprovides = ["device.chip"]\n'
        'verified = "never run on its device"\n'
    )
    install("acme-chip", "chip", kind="platform", manifest=manifest)
    registry = PluginRegistry()
    (chip,) = [
        candidate for candidate in registry.candidates("platform") if candidate.name == "chip"
    ]
    return Trial(plugin=chip, **how), registry


def test_a_device_without_a_platform_is_reported(monkeypatch):
    monkeypatch.setattr(devices_module, "version", lambda name: "2.13.0")
    (finding,) = check_devices(CHIP, [], PluginRegistry())
    assert (finding.area, finding.subject, finding.verdict) == ("machine", "device", WARNING)
    assert "no installed platform supports" in finding.text and "pip install" in finding.remedy
    assert not list(check_devices([], [], PluginRegistry()))


def test_a_device_is_reported_with_the_reason_of_an_unusable_platform(install, monkeypatch):
    monkeypatch.setattr(devices_module, "version", lambda name: "2.13.0+cpu")
    trial, registry = accelerator_trial(install, refusals=("the driver is older than 13.0",))
    unused, torch = check_devices(CHIP, [trial], registry)
    assert "chip: the driver is older than 13.0" in unused.text
    assert torch.subject == "torch" and "a CPU-only build" in torch.text
    monkeypatch.setattr(devices_module, "version", lambda name: "2.13.0")
    assert len(list(check_devices(CHIP, [trial], registry))) == 1


def test_a_usable_device_is_not_reported(install):
    trial, registry = accelerator_trial(install)
    assert not list(check_devices(CHIP, [trial], registry))
    (note,) = verified_findings([trial.plugin], registry)
    assert note.verdict == NOTE and note.text == "verified: never run on its device"


def test_the_doctor_reports_a_finding_for_each_plugin(monkeypatch):
    fake = namedtuple("Fake", "plugin error refusals noise notes took_ns ended hung")
    tried = []

    def pretend(plugins, *, deadline_s):
        tried.extend(plugins)
        return [fake(plugin, "", (), "", (), 0, False, False) for plugin in plugins]

    monkeypatch.setattr("dovetail_devkit.doctor.examination.try_plugins", pretend)
    reports = []
    findings = examine(progress=reports.append)
    assert len(tried) == sum(len(PluginRegistry().candidates(kind)) for kind in KINDS)
    subjects = [finding.subject for finding in findings]
    assert [f"{plugin.kind}:{plugin.reference}" for plugin in tried] == subjects[-len(tried) :]
    assert len(reports) == 3
