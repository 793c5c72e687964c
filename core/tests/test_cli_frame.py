"""The command line: its output, imports, errors and start time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

import dovetail
from dovetail.cli import main
from dovetail.cli.app import COMMANDS, make_app

SOURCE = Path(dovetail.__file__).parents[1]
RUN = (
    "import sys; from dovetail.cli import main; code = main(sys.argv[1:]); {check}; sys.exit(code)"
)
BANNED = ("torch", "numpy", "transformers", "unused_mod")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on sys.path with one plugin that must not be imported."""
    install(
        tmp_path,
        "unused-dist",
        "[dovetail.policy]\nunused = unused_mod:Unused\n",
    )
    (tmp_path / "unused_mod.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(site: Path, name: str, entries: str) -> None:
    info = site / f"{name.replace('-', '_')}-3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.1\n")
    (info / "entry_points.txt").write_text(entries)


def run(site: Path, *arguments: str, check: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(SOURCE)])}
    command = [sys.executable, "-W", "error", "-c", RUN.format(check=check or "pass"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.costly
@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["plugins", "list"], ["plugins", "list", "--json"], ["collect-env"], ["nonsense"]],
)
def test_the_command_line_does_not_import_plugins_or_large_libraries(
    site: Path, arguments: list[str]
) -> None:
    check = f"print('loaded', *[m for m in {BANNED!r} if m in sys.modules], sep=':')"
    done = run(site, *arguments, check=check)
    assert done.stdout.splitlines()[-1] == "loaded"


def test_the_help_option_does_not_import_commands(site: Path) -> None:
    modules = [path.partition(":")[0] for _, path, _ in COMMANDS]
    check = f"print('loaded', *[m for m in {modules!r} if m in sys.modules], sep=':')"
    done = run(site, "--help", check=check)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "loaded"
    for words, _, text in COMMANDS:
        assert words.partition(" ")[0] in done.stdout
        assert text in done.stdout or " " in words


def test_every_command_can_be_imported() -> None:
    app = make_app()
    for words, _, _ in COMMANDS:
        actual = app
        for word in words.split():
            actual = actual[word]
        assert callable(actual.default_command)


def test_plugins_list_prints_one_line_per_plugin(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "a_package.with_a_long_name.and_modules.that_never_end.in_deep_places:ClassOfALongName"
    install(site, "long-dist", f"[dovetail.policy]\nlong = {long}\n")
    assert main(["plugins", "list", "policy"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["kind", "name", "distribution", "target"]
    assert [
        "policy",
        "unused",
        "unused-dist",
        "3.1",
        "unused_mod:Unused",
    ] in [line.split() for line in lines]
    assert any(line.split()[-1] == long for line in lines)


def test_plugins_list_shows_where_a_plugin_was_tested(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = '[[plugin]]\nkind = "policy"\nname = "chip"\nverified = "Acme One, 2026-11-21"\n'
    package = site / "chip_mod"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('it was imported')")
    (package / "dovetail.toml").write_text(manifest)
    install(site, "chip-dist", "[dovetail.policy]\nchip = chip_mod:Chip\n")
    assert main(["plugins", "list", "policy"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[-1] == "verified"
    output = {line.split()[1]: line.split()[5:] for line in lines}
    assert output["chip"] == ["Acme", "One,", "2026-11-21"] and output["unused"] == []
    assert main(["plugins", "show", "policy:chip"]) == 0
    assert "verified      Acme One, 2026-11-21" in capsys.readouterr().out


def test_plugins_list_writes_json(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list", "--json"]) == 0
    assert {
        "kind": "policy",
        "name": "unused",
        "target": "unused_mod:Unused",
        "distribution": "unused-dist",
        "version": "3.1",
        "verified": "",
    } in json.loads(capsys.readouterr().out)


def test_plugins_with_unreadable_metadata_are_reported_on_stderr(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, "odd-dist", "[dovetail.policy]\nodd = no_class_here\n")
    assert main(["plugins", "list", "--json"]) == 0
    output = capsys.readouterr()
    assert "odd-dist 3.1 declares 'odd'" in output.err
    json.loads(output.out)


@pytest.mark.clock
def test_200_distributions_are_listed_within_the_time_limit(tmp_path: Path) -> None:
    for index in range(200):
        install(tmp_path, f"dist-{index}", f"[dovetail.policy]\np{index} = mod_{index}:P\n")
    start = time.perf_counter()
    done = run(tmp_path, "plugins", "list", "policy")
    elapsed = time.perf_counter() - start
    assert "mod_199:P" in done.stdout
    assert elapsed < 3 * 0.5


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["plugns"], "plugins"),
        (["plugins", "lst"], "list"),
        (["plugins", "list", "--jsn"], "--json"),
        (["plugins", "list", "schedulr"], "scheduler"),
        (["--tracebak"], "--traceback"),
        (["collect-env", "surplus"], 'Unexpected argument: "surplus".'),
        (["explain"], 'Did you mean "plugins explain"'),
        (["latency"], 'Did you mean "bench latency"?'),
        (["plugins", "explain"], 'Command "plugins explain" needs KIND.'),
        (["plugins", "show", "--load"], 'Command "plugins show" needs PLUGIN.'),
        (["chat", "--model"], "--model requires an argument"),
    ],
)
def test_the_error_for_an_invalid_command_suggests_the_nearest_command(
    arguments: list[str], output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert output in captured.err
    assert len(captured.err.splitlines()) <= 3
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(("arguments", "expected"), [((), 1), (("--traceback",), 2)])
def test_the_options_of_a_command_are_built_once(
    arguments: tuple[str, ...], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options of `chat` take 10 ms. The frame has a parser of its own for --traceback."""
    from dovetail.cli.plugins_list import list_plugins

    built, assemble = [], App.assemble_argument_collection

    def count(app: App, **keywords: Any) -> Any:
        if app.default_command is list_plugins:
            built.append(app)
        return assemble(app, **keywords)

    monkeypatch.setattr(App, "assemble_argument_collection", count)
    assert main(["plugins", "list", "policy", *arguments]) == 0
    assert len(built) == expected


def test_the_traceback_is_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list", "schedulr", "--traceback"]) == 2
    output = capsys.readouterr().err
    assert "Traceback" in output and "PluginNotFoundError" in output


def test_long_errors_are_shortened_with_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dovetail.cli import plugins_list
    from dovetail.errors import ContractError

    def fail() -> None:
        raise ContractError("head\n  - one\n  - two\n  - three")

    monkeypatch.setattr(plugins_list, "PluginRegistry", fail)
    assert main(["plugins", "list"]) == 2
    output = capsys.readouterr().err.splitlines()
    assert output == ["dovetail: head", "  - one", "… and 2 more lines; --traceback shows them."]


def test_control_characters_and_long_lines_of_errors_are_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dovetail.cli import plugins_list
    from dovetail.errors import ContractError

    def fail() -> None:
        raise ContractError("head \x1b[2J\x9b2J\r tail\t1\nlong " + "x" * 100_000)

    monkeypatch.setattr(plugins_list, "PluginRegistry", fail)
    assert main(["plugins", "list"]) == 2
    output = capsys.readouterr().err
    assert "\x1b" not in output and "\x9b" not in output and "\r" not in output
    assert output.startswith("dovetail: head \u241b[2J") and len(output) < 10_000


def test_internal_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from dovetail.cli import plugins_list

    monkeypatch.setattr(plugins_list, "PluginRegistry", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["plugins", "list"])


def test_an_interrupt_exits_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dovetail.cli import plugins_list

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plugins_list, "PluginRegistry", interrupt)
    assert main(["plugins", "list"]) == 130
    assert capsys.readouterr().err == ""


def test_a_closed_output_pipe_is_not_an_error(site: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(SOURCE)])}
    command = [sys.executable, "-c", RUN.format(check="pass"), "plugins", "list", "--json"]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            command, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_collect_env_describes_the_environment_without_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    assert main(["collect-env"]) == 0
    output = capsys.readouterr().out
    for heading in ("Software", "System", "CPU", "Memory", "Tools and devices"):
        assert f"\n{heading}\n" in f"\n{output}"
    assert f"{sys.version_info.major}.{sys.version_info.minor}." in output
    assert "hf_very_secret" not in output
    assert str(Path.home()) not in output


def test_the_version_option_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("dovetail ")
