"""Damaged or hostile metadata affects only its own distribution and never blocks discovery."""

from __future__ import annotations

import os
import sys

import pytest

from dovetail.config.model_sources import source_names
from dovetail.errors import PluginLoadError
from dovetail.plugins import PluginRegistry
from dovetail.plugins.metadata.commands import find_commands
from dovetail.plugins.resolving.class_denial import _owners_of_packages

POLICY = """
from dovetail.interfaces import Policy


class Mine(Policy):
    def rank(self, request, view):
        return 0
"""
HEAD = '[[plugin]]\nkind = "policy"\nname = "mine"\n'


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A directory on sys.path with one distribution that has a policy."""
    (tmp_path / "odd_mine").mkdir()
    (tmp_path / "odd_mine/__init__.py").write_text(POLICY)
    info = tmp_path / "odd_mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dovetail.policy]\nmine = odd_mine:Mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("odd_mine", None)


def fifo(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def loop(path):
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def device(path):
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def content(data):
    return lambda path: path.write_bytes(data)


def large(path):
    path.write_bytes(b"")
    os.truncate(path, 3 << 30)


def check_others_are_unharmed():
    registry = PluginRegistry()
    assert registry.load("scheduler", "fcfs").__name__ == "FCFSScheduler"
    registry.check_manifests()
    assert source_names(PluginRegistry()) is not None
    assert find_commands(()).usable is not None
    assert _owners_of_packages()["pytest"] == ["pytest"]
    return registry


@pytest.mark.costly
@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "damage",
    [fifo, loop, device, large, content(b"[dovetail.policy]\nx\xff = a:B\n")],
    ids=["fifo", "loop", "device", "large", "not utf-8"],
)
def test_entry_points_that_cannot_be_read_are_skipped(site, damage):
    damage(site / "odd_mine-1.0.dist-info/entry_points.txt")
    registry = check_others_are_unharmed()
    assert any("odd_mine-1.0.dist-info" in item for item in registry.set_aside)
    assert all(candidate.name != "mine" for candidate in registry.candidates("policy"))


@pytest.mark.costly
@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "damage",
    [
        fifo,
        loop,
        device,
        content(b""),
        content(b"\xff\xfe\x00"),
        content(b"Name: odd\xffmine\nVersion: 1\n"),
        content(b"Name: odd\x1b[2Jmine\nVersion: 1\n"),
        content("Name: dоvetail-cpu\nVersion: 1\n".encode()),  # a Cyrillic letter
        content(b"Name: odd-mine-\nVersion: 1\n"),
        content(b"Name: " + b"x" * 100_000 + b"\nVersion: 1\n"),
    ],
)
def test_a_distribution_without_a_valid_name_is_skipped(site, damage):
    damage(site / "odd_mine-1.0.dist-info/METADATA")
    registry = check_others_are_unharmed()
    (message,) = [item for item in registry.set_aside if "odd_mine-1.0.dist-info" in item]
    assert message.isprintable() and len(message) < 500


def test_the_first_of_two_names_in_a_metadata_file_is_used(site):
    (site / "odd_mine-1.0.dist-info/METADATA").write_text(
        "Name: odd-mine\nName: dovetail-sched-fcfs\nVersion: 1\nVersion: \x1b[2J\n"
    )
    (own,) = [
        candidate for candidate in PluginRegistry().candidates("policy") if candidate.name == "mine"
    ]
    assert (own.distribution, own.version, own.first_party) == ("odd-mine", "1", False)


@pytest.mark.costly
@pytest.mark.parametrize(
    "line",
    [
        "auto = odd_mine:Mine",
        "a@b = odd_mine:Mine",
        "a:b = odd_mine:Mine",
        "./a.py = odd_mine:Mine",
        "\x1b[31mred = odd_mine:Mine",
        "x" * 300 + " = odd_mine:Mine",
        "= odd_mine:Mine",
        "odd =",
        "odd = odd_mine",
        "odd = odd_mine:",
        "odd = :Mine",
        "odd = .odd_mine:Mine",
        "odd = odd_mine:Mine:Mine",
        "odd = odd_mine;rm:Mine",
        "odd = ../odd_mine:Mine",
        "odd = " + "odd_mine." * 1000 + "odd:Mine",
    ],
    ids=range(16),
)
def test_an_entry_point_without_a_class_is_skipped(site, line):
    points = site / "odd_mine-1.0.dist-info/entry_points.txt"
    points.write_text(f"[dovetail.policy]\n{line}\nmine = odd_mine:Mine [extra]\n")
    registry = check_others_are_unharmed()
    (message,) = [item for item in registry.set_aside if item.startswith("odd-mine")]
    assert message.isprintable() and len(message) < 500
    assert [
        candidate.name for candidate in registry.candidates("policy") if "odd" in candidate.target
    ] == ["mine"]
    assert registry.load("policy", "mine").__name__ == "Mine"


@pytest.mark.costly
@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "damage",
    [
        fifo,
        loop,
        device,
        large,
        lambda path: path.mkdir(),
        content(b"\xff"),
        content(HEAD.encode() + b"x = " + b"[" * 50_000),
        content(HEAD.encode() + b"x = " + b"{a=" * 5_000),
        content(HEAD.encode() + b"a" + b".a" * 50_000 + b" = 1\n"),
        content(HEAD.encode() + b"#" + b"x" * 1_000_000),
        content(b'[[plugin]]\nkind = "policy"\nname = ["mine"]\n'),
        content(b'[[plugin]]\nkind = {}\nname = "mine"\n'),
        content(b"[[plugin]]\nkind = {}\nname = {}\n"),
        content(b'[[plugin]]\nkind = "policy"\nname = "' + b"x" * 100_000 + b'"\n'),
    ],
    ids=range(14),
)
def test_an_invalid_manifest_affects_its_own_distribution_only(site, damage):
    damage(site / "odd_mine/dovetail.toml")
    registry = check_others_are_unharmed()
    with pytest.raises(PluginLoadError, match=r"dovetail\.toml") as caught:
        registry.load("policy", "mine")
    assert len(str(caught.value)) < 2000
    assert "odd_mine" not in sys.modules
