"""The recorded output in docs/plugins/commands.md is up to date."""

from __future__ import annotations

from docs.pages import page
from docs.record_commands import printed, recorded

from dovetail.cli.app import COMMANDS
from dovetail.plugins import KINDS, PluginRegistry
from dovetail.plugins.metadata.commands import DEVKIT_COMMANDS, find_commands

RENEW = "run `python tests/docs/record_commands.py`"


def test_the_recorded_plugin_list_contains_every_plugin():
    lines = recorded()["dovetail plugins list"].splitlines()[1:]
    rows = [line.split()[:5] for line in lines]  # the remaining columns show where it was verified
    listed = {(kind, name, target) for kind, name, _, _, target in rows}
    registry = PluginRegistry()
    commands = [candidate for kind in KINDS for candidate in registry.candidates(kind)]
    commands += [command.plugin for command in find_commands(()).usable]
    installed = {(item.kind, item.name, item.target) for item in commands if item.first_party}
    assert listed == installed, RENEW


def test_every_plugins_command_is_recorded_and_none_failed():
    words = {words for words, *_ in COMMANDS if words.startswith("plugins ")}
    words.update(DEVKIT_COMMANDS)
    by_name = {" ".join(command.split()[1:3]) for command in recorded()}
    assert by_name == words, RENEW
    assert all(recorded().values()), RENEW
    assert "Traceback" not in page("commands").text, RENEW


def test_a_command_prints_its_recorded_output(tmp_path):
    command = "dovetail plugins show attention:torch"
    assert printed(command, tmp_path) == recorded()[command], RENEW
