"""Hooks without an engine: validation, call order and error reports."""

import logging

import pluggy
import pytest

from dovetail.cli import main
from dovetail.cli.app import HOOKS_VARIABLE
from dovetail.errors import ConfigError, ContractError, PluginError, PluginNotFoundError
from dovetail.interfaces import Hooks, HookSpecs
from dovetail.plugins import PluginRegistry
from dovetail.plugins.hooks import HOOK_NAMES, HookPlugins, load_hooks
from dovetail_devkit.fakes.hooks import FakeHooks

CALLS = []


class Plain:
    """A hooks class without a base class. One of its hooks accepts no parameter."""

    def __init__(self, context):
        self.context = context

    def on_engine_start(self):
        CALLS.append("plain")


class First(Hooks):
    def __init__(self, context):
        pass

    @pluggy.HookimplMarker("dovetail")(tryfirst=True)
    def on_engine_start(self, config):
        CALLS.append(f"first of {config}")


class Last(Hooks):
    def __init__(self, context):
        pass

    def on_engine_start(self, config):
        CALLS.append("last")

    def on_engine_stop(self):
        raise RuntimeError("no end")


class Exits(Plain):
    def on_engine_start(self):
        raise SystemExit(3)


@pytest.fixture(autouse=True)
def message():
    CALLS.clear()
    return CALLS


def load(*references):
    return load_hooks(references, PluginRegistry())


def test_the_hook_names_match_the_recorded_list():
    assert HOOK_NAMES == (
        "register_cli",
        "on_engine_start",
        "on_engine_stop",
        "on_step",
        "on_request_error",
    )


def test_hooks_are_called_in_the_given_order(message):
    load(Last, Plain, First).notify("on_engine_start", config="c")
    assert message == ["first of c", "last", "plain"]  # hooks with tryfirst are called first


def test_only_defined_hooks_are_subscribed():
    hooks = load(Plain, FakeHooks)
    assert [subscriber.plugin for subscriber in hooks.subscribers("on_step")] == ["FakeHooks"]
    assert [subscriber.plugin for subscriber in hooks.subscribers("on_engine_start")] == [
        "Plain",
        "FakeHooks",
    ]
    assert load().subscribers("on_step") == ()


def test_a_subclass_of_hooks_subscribes_only_to_its_own_methods():
    class Typed(HookSpecs, Hooks):
        def __init__(self, context):
            pass

        def on_step(self, step):
            pass

    hooks = load(Typed)
    assert [name for name in HOOK_NAMES if hooks.subscribers(name)] == ["on_step"]


def test_the_error_for_a_listener_that_raises_at_startup_names_it():
    with pytest.raises(PluginError, match="'Exits' failed in on_engine_start: SystemExit: 3") as e:
        load(Plain, Exits).notify("on_engine_start", config=None)
    assert isinstance(e.value.__cause__, SystemExit)


def test_an_error_during_shutdown_does_not_affect_other_listeners(caplog):
    fake = FakeHooks(None)
    hooks = HookPlugins({"bad": Last(None), "fake": fake})
    with caplog.at_level(logging.WARNING):
        hooks.notify_all("on_engine_stop")
    assert fake.calls == [("on_engine_stop", None)]
    assert caplog.messages == [
        "The hooks plugin 'bad' failed in on_engine_stop: RuntimeError: no end."
    ]


def test_a_keyboard_interrupt_is_not_caught():
    class Interrupted(Plain):
        def on_engine_start(self):
            raise KeyboardInterrupt

    for notify in (load(Interrupted).notify, load(Interrupted).notify_all):
        with pytest.raises(KeyboardInterrupt):
            notify("on_engine_start", config=None)


def method(name, function):
    return type("Wrong", (Plain,), {name: function})


async def later(self, step):
    pass


@pytest.mark.parametrize(
    ("hooks_cls", "message"),
    [
        (method("on_stp", lambda self, step: None), "not a hook. Did you mean 'on_step'"),
        (method("register_metrics", lambda self: None), "'register_metrics', which is not a hook"),
        (method("on_step", lambda self, stats: None), "incompatible hook: .*stats"),
        (method("on_step", later), "as async"),
        (
            method(
                "on_step", pluggy.HookimplMarker("dovetail")(wrapper=True)(lambda s, step: (yield))
            ),
            "wraps on_step",
        ),
    ],
)
def test_invalid_hook_methods_are_rejected(hooks_cls, message):
    with pytest.raises(ContractError, match=message):
        load(hooks_cls).subscribers("on_step")


def test_duplicate_hooks_are_rejected():
    with pytest.raises(ConfigError, match="hooks contains 'Plain' twice"):
        load(Plain, Plain)


def test_an_unknown_hooks_plugin_is_rejected():
    with pytest.raises(PluginNotFoundError, match="no hooks plugin 'nobody'"):
        load("nobody")


@pytest.fixture
def hooks_module(tmp_path, monkeypatch):
    (tmp_path / "hooks_of_a_test.py").write_text(
        "class Greeting:\n"
        "    def __init__(self, context): pass\n"
        "    def register_cli(self, app):\n"
        "        def greet() -> int:\n"
        "            'Greet.'\n"
        "            print('hello from a hook')\n"
        "            return 7\n"
        "        app.command(greet, name='greet')\n"
        "class Failing(Greeting):\n"
        "    def register_cli(self, app):\n"
        "        raise KeyError('no command')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def test_an_enabled_hook_can_register_a_command(hooks_module, monkeypatch, capsys):
    assert main(["greet"]) == 2
    monkeypatch.setenv(HOOKS_VARIABLE, "hooks_of_a_test:Greeting, ")
    assert main(["greet"]) == 7
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("hello from a hook\n") and "greet" in printed


def test_a_hook_that_fails_to_register_a_command_is_reported_with_exit_code_2(
    hooks_module, monkeypatch, capsys
):
    monkeypatch.setenv(HOOKS_VARIABLE, "hooks_of_a_test:Failing")
    assert main(["plugins", "list"]) == 2
    message = capsys.readouterr()
    assert "'Failing' failed in register_cli: KeyError" in message.err and not message.out
    monkeypatch.setenv(HOOKS_VARIABLE, "hooks_of_a_test:Nobody")
    assert main(["plugins", "list"]) == 2
    assert "Nobody" in capsys.readouterr().err
