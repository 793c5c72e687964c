"""Side effects of plugin imports, and their reports."""

import os
import sys
import threading

import pytest

from dovetail.clock import ManualClock
from dovetail.errors import ConfigError, PluginLoadError
from dovetail.plugins.construction import call_plugin, construct
from dovetail.plugins.containment import contained, describe_failure

POLICY = "from dovetail.interfaces import Policy\nclass Fair(Policy):\n    pass\n"
ENTRIES = {"policy": {"fair": ".parts:Fair", "good": ".good:Fair"}}


def loaded(package):
    return sorted(n for n in sys.modules if n == package or n.startswith(f"{package}."))


# --- modules ------------------------------------------------------------------------------------


def test_a_failed_import_leaves_no_module_of_its_package(plugin_site):
    parts = "from acme import first\nimport shared_library\n1 / 0\n"
    plugin_site.add("acme", ENTRIES, parts=parts, first="", good=POLICY)
    plugin_site.add("acme-extra", {}, init="")
    (plugin_site.path / "shared_library.py").write_text("import acme_extra\n")
    registry = plugin_site.registry()
    with pytest.raises(PluginLoadError, match="ZeroDivisionError"):
        registry.load("policy", "fair")
    assert loaded("acme") == []
    assert {"shared_library", "acme_extra"} <= sys.modules.keys()


def test_a_failed_import_keeps_previously_imported_modules(plugin_site):
    plugin_site.add("acme", ENTRIES, parts="from acme import first\n1 / 0\n", first="", good=POLICY)
    registry = plugin_site.registry()
    valid = registry.load("policy", "good")
    before, package = loaded("acme"), sys.modules["acme"]
    with pytest.raises(PluginLoadError):
        registry.load("policy", "fair")
    assert loaded("acme") == before and sys.modules["acme"] is package
    assert not hasattr(package, "first") and package.good.Fair is valid
    (plugin_site.path / "acme" / "parts.py").write_text(POLICY + "# fixed\n")
    assert registry.load("policy", "fair").__module__ == "acme.parts"


def test_the_modules_of_a_class_that_violates_its_contract_stay_imported(plugin_site):
    plugin_site.add("acme", ENTRIES, parts="class Fair:\n    rank = None\n")
    with pytest.raises(TypeError):
        plugin_site.registry().load("policy", "fair")
    assert loaded("acme") == ["acme", "acme.parts"]


def test_a_failed_import_never_removes_core_modules():
    module = sys.modules["dovetail.clock"]
    with pytest.raises(ValueError), contained("dovetail", ManualClock()):
        del sys.modules["dovetail.clock"]
        sys.modules["dovetail.clock"] = module
        sys.modules["dovetail.invented"] = module
        raise ValueError
    assert sys.modules.pop("dovetail.invented") is module


# --- output and time ----------------------------------------------------------------------------


def test_output_of_an_import_is_logged_and_not_printed(plugin_site, capsys):
    plugin_site.add("acme", ENTRIES, parts=f"print('buy acme pro')\n{POLICY}")
    registry = plugin_site.registry()
    registry.load("policy", "fair")
    assert capsys.readouterr().out == ""
    assert registry.resolutions[0].notes == ("Importing acme printed 'buy acme pro'.",)


def test_output_of_a_failed_import_is_part_of_its_error(plugin_site, capsys):
    plugin_site.add("acme", ENTRIES, parts="print('no license ' * 40)\nraise OSError\n")
    with pytest.raises(PluginLoadError) as failure:
        plugin_site.registry().load("policy", "fair")
    *_, note = failure.value.__notes__
    assert note.startswith("The import of acme printed 'no license no") and len(note) < 180
    assert capsys.readouterr().out == ""


def test_other_threads_can_print_during_an_import(capsys):
    def shout():
        print("from another thread")

    with contained("acme", ManualClock()) as notes:
        print("from the plugin")
        thread = threading.Thread(target=shout)
        thread.start()
        thread.join()
    assert capsys.readouterr().out == "from another thread\n"
    assert notes == ["Importing acme printed 'from the plugin'."]


@pytest.mark.parametrize(("seconds", "message"), [(1.0, []), (2.5, ["Importing acme took 2.5 s."])])
def test_a_slow_import_is_logged(plugin_site, monkeypatch, seconds, message):
    class Waiting:
        clock = ManualClock()

    monkeypatch.setitem(sys.modules, "waiting", Waiting)
    wait = f"import waiting\nwaiting.clock.advance({int(seconds * 1e9)})\n"
    plugin_site.add("acme", ENTRIES, parts=wait + POLICY)
    registry = plugin_site.registry(clock=Waiting.clock)
    registry.load("policy", "fair")
    assert list(registry.resolutions[0].notes) == message


# --- constructors and calls ---------------------------------------------------------------------


class Fails:
    error: BaseException = ValueError("a\nb")

    def __init__(self, context=None):
        raise self.error


def fails(error):
    return type("Fails", (Fails,), {"error": error})


@pytest.mark.parametrize("error", [ValueError("a\nb"), SystemExit(2), AssertionError(), KeyError()])
def test_a_constructor_that_fails_is_reported_as_the_plugins_error(error):
    for call in (lambda: construct("ops", fails(error)), lambda: construct("ops", fails(error), 1)):
        with pytest.raises(PluginLoadError) as failure:
            call()
        assert failure.value.__cause__ is error
        assert f"The ops {__name__}:Fails was loaded, but its constructor failed" in str(
            failure.value
        )
        assert f"{type(error).__name__}" in str(failure.value)
        assert f", in {__name__}:Fails.__init__" in str(failure.value)


@pytest.mark.parametrize("error", [ConfigError("mine"), KeyboardInterrupt()])
def test_dovetail_errors_and_interrupts_are_not_wrapped(error):
    with pytest.raises(type(error)) as failure:
        construct("ops", fails(error))
    assert failure.value is error
    with pytest.raises(type(error)):
        call_plugin("platform 'x'", "capabilities", fails(error))


def test_a_failed_call_is_reported_as_the_plugins_error():
    with pytest.raises(PluginLoadError, match=r"'x' failed when the engine called it for its cap"):
        call_plugin("platform 'x'", "capabilities", fails(SystemExit()))
    assert call_plugin("platform 'x'", "capabilities", lambda: 3) == 3


def test_the_description_of_a_failure_contains_its_location():
    try:
        os.fspath(3)
    except TypeError as error:
        index = f", in {__name__}:test_the_description_of_a_failure_contains_its_location"
        assert describe_failure(error).endswith(index)
    assert describe_failure(ValueError("one\ntwo")) == "ValueError: one"
