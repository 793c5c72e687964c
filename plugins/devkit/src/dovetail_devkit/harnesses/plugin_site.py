"""Fixtures that install fictitious plugins, for tests of plugin discovery and the registry."""

from __future__ import annotations

import sys
from importlib.metadata import distributions

import pytest

from dovetail.plugins import PluginRegistry
from dovetail.plugins.metadata import first_party

MADE_UP_MEMBERS = [f"dovetail-{name}" for name in ("a", "b", "bad", "box", "good", "low", "none")]
"""Distributions that count as first-party in tests with the fixture `plugin_site`."""


class PluginSite:
    """A directory on sys.path for fictitious distributions."""

    def __init__(self, path):
        self.path = path

    def add(self, name, entries, *, manifest=None, version="1.0", **modules):
        """Install a distribution. Its package has the same name, with underscores for dashes.

        entries: map of kind to {plugin name: target}; a target that begins with ":" or "." is in
        the package. modules: source of each module; `init` is the source of `__init__.py`.
        """
        package = self.path / name.replace("-", "_")
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(modules.pop("init", ""))
        for module, source in modules.items():
            (package / f"{module}.py").write_text(source)
        if manifest is not None:
            (package / "dovetail.toml").write_text(manifest)
        info = self.path / f"{package.name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = []
        for kind, targets in entries.items():
            lines.append(f"[dovetail.{kind}]")
            for entry, target in targets.items():
                lines.append(f"{entry} = {package.name if target[0] in ':.' else ''}{target}")
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")

    def registry(self, **engine_args):
        """Return a registry that finds only plugins of this directory."""
        return PluginRegistry(distributions=distributions(path=[str(self.path)]), **engine_args)


@pytest.fixture
def count_as_member(monkeypatch):
    """Return `count_as_member(name, package)`, which makes a distribution first-party."""
    listed = dict(first_party.FIRST_PARTY)
    monkeypatch.setattr(first_party, "FIRST_PARTY", listed)

    def count(name, package):
        listed[name] = package

    return count


@pytest.fixture
def plugin_site(tmp_path, monkeypatch, count_as_member):
    """Return a directory in which `plugin_site.add(…)` installs fictitious plugins. Their modules
    are unloaded after the test."""
    site = PluginSite(tmp_path / "site")
    site.path.mkdir()
    for name in MADE_UP_MEMBERS:
        count_as_member(name, name.replace("-", "_"))
    monkeypatch.syspath_prepend(str(site.path))
    before = set(sys.modules)
    yield site
    for name in set(sys.modules) - before:
        top = name.partition(".")[0]
        if (site.path / top).exists():
            del sys.modules[name]
