"""Commands of installed packages are found without imports and imported when used."""

import subprocess
import sys
from functools import partial
from importlib import import_module
from importlib.metadata import distributions

import pytest

from dovetail.cli import main
from dovetail.plugins.metadata import commands
from dovetail.plugins.metadata.commands import find_commands
from dovetail.plugins.registry import PluginRegistry
from dovetail_devkit.doctor import BROKEN, WARNING
from dovetail_devkit.doctor.registrations import check_registrations

LINE = '[[plugin]]\nkind = "command"\nname = "zoo.feed"\nhelp = "Feed an animal."\n'
FEED = "def feed(animal: str, *, times: int = 1):\n    print(animal * times)\n    return 3\n"
BOMB = "raise RuntimeError('imported')\n"


@pytest.fixture
def zoo(plugin_site):
    """A distribution with two commands, one of which must never be imported."""
    entries = {"command": {"zoo.feed": ".feeding:feed", "zoo.free-all": ".bomb:free"}}
    plugin_site.add("acme-zoo", entries, manifest=LINE, feeding=FEED, bomb=BOMB)
    return plugin_site


def find(site, *built_in):
    return find_commands(built_in, distributions(path=[str(site.path)]))


def test_commands_are_found_with_their_help_lines(zoo):
    commands = find(zoo, "plugins list")
    assert [(item.words, item.help) for item in commands.usable] == [
        ("zoo feed", "Feed an animal."),
        ("zoo free-all", "A command of acme-zoo."),
    ]
    assert commands.usable[0].plugin.target == "acme_zoo.feeding:feed"
    assert not commands.set_aside and "acme_zoo" not in sys.modules


def test_only_the_selected_command_is_imported_and_run(zoo, capsys):
    assert main(["zoo", "feed", "cat", "--times", "2"]) == 3
    assert capsys.readouterr().out == "catcat\n"
    assert "acme_zoo.bomb" not in sys.modules


def test_help_does_not_import_plugin_commands(zoo, capsys):
    assert main(["--help"]) == 0
    assert "Commands of acme-zoo." in capsys.readouterr().out
    assert main(["zoo", "--help"]) == 0
    message = capsys.readouterr().out
    assert "Feed an animal." in message and "free-all" in message
    assert "acme_zoo" not in sys.modules


def test_a_command_that_cannot_be_imported_is_reported_with_its_distribution(zoo, capsys):
    assert main(["zoo", "free-all"]) == 2
    message = capsys.readouterr().err
    assert "'zoo.free-all' of acme-zoo 1.0" in message and "RuntimeError: imported" in message
    assert "Traceback" not in message
    assert main(["--traceback", "zoo", "free-all"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_plugins_list_shows_commands_as_a_plugin_kind(zoo, capsys):
    assert main(["plugins", "list", "command"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["command", "zoo.feed", "acme-zoo", "1.0", "acme_zoo.feeding:feed"] in rows
    assert {row[0] for row in rows} == {"kind", "command"}
    assert main(["plugins", "list"]) == 0
    assert "zoo.feed" in capsys.readouterr().out
    assert main(["plugins", "list", "policy"]) == 0
    assert "zoo.feed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("generate", "a command of Dovetail has the same words"),
        ("plugins.list", "a command of Dovetail has the same words"),
        ("plugins", "one command is a prefix of the other"),
        ("generate.more", "one command is a prefix of the other"),
        ("Loud", "is not a valid command name"),
        ("zoo feed", "is not a valid command name"),
        ("zoo", "one command is a prefix of the other"),
    ],
)
def test_an_invalid_command_name_is_skipped_with_the_reason(name, reason, zoo):
    zoo.add("odd-one", {"command": {name: ":run"}}, init="def run():\n    return 9\n")
    commands = find(zoo, "generate", "plugins list")
    aside = {item.plugin.name: why for item, why in commands.set_aside}
    assert reason in aside[name]
    assert name not in [item.plugin.name for item in commands.usable]


def test_a_command_name_may_be_a_prefix_of_another_command_name(zoo):
    zoo.add("near-one", {"command": {"gen": ":run", "zoo.feed-two": ":run"}})
    commands = find(zoo, "generate")
    assert {"gen", "zoo feed", "zoo feed-two"} <= {item.words for item in commands.usable}


def test_a_command_name_of_two_distributions_is_ambiguous(zoo):
    zoo.add("other-zoo", {"command": {"zoo.feed": ":feed"}})
    commands = find(zoo)
    assert [item.words for item in commands.usable] == ["zoo free-all"]
    assert len(commands.set_aside) == 2
    assert all("acme-zoo, other-zoo" in reason for _, reason in commands.set_aside)


def test_a_core_command_takes_precedence_and_doctor_reports_the_conflict(zoo, capsys):
    zoo.add("thief", {"command": {"plugins.list": ":run", "x.y": "no_function"}}, init=BOMB)
    assert main(["plugins", "list", "policy"]) == 0
    assert "thief" not in sys.modules
    by_name = {
        check_registration.subject: check_registration
        for check_registration in check_registrations(PluginRegistry())
    }
    finding = by_name["command:plugins.list@thief"]
    assert finding.verdict == WARNING and "takes precedence" in finding.text and finding.remedy
    assert "does not name a function" in by_name["command:x.y@thief"].text
    assert not [
        item for item in by_name.values() if item.verdict == BROKEN and "zoo" in item.subject
    ]


def test_core_commands_do_not_search_for_plugin_commands():
    code = (
        "import sys; from dovetail.cli import main; main(['collect-env']);"
        "sys.exit('dovetail.plugins.metadata.commands' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("command", ["plugins doctor", "plugins new policy mine"])
def test_devkit_commands_without_the_devkit_print_one_line(command, zoo, capsys, monkeypatch):
    only_zoo = partial(find_commands, installed=distributions(path=[str(zoo.path)]))
    monkeypatch.setattr(commands, "find_commands", only_zoo)
    assert main(command.split()) == 2
    message = capsys.readouterr().err
    assert "pip install dovetail-devkit" in message and len(message.splitlines()) == 1


def test_a_third_party_distribution_cannot_replace_a_devkit_command(zoo):
    zoo.add("thief", {"command": {"plugins.new": ":run"}}, init=BOMB)
    aside = {item.plugin.name: why for item, why in find(zoo).set_aside}
    assert "first-party" in aside["plugins.new"]


def test_the_error_for_importing_the_former_devkit_package_names_the_new_package():
    with pytest.raises(ImportError, match="dovetail_devkit"):
        import_module("dovetail.testing")
    with pytest.raises(ImportError, match="dovetail_devkit"):
        import_module("dovetail.testing.fake_worker")
