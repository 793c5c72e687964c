"""Startup phases are recorded, reported, undone on failure and limited in time."""

import signal
import threading
import time

import pytest

from dovetail.clock import ManualClock, MonotonicClock
from dovetail.errors import CapacityError, StartError
from dovetail.plugins import PluginRegistry
from dovetail.plugins.construction import construct
from dovetail.processes.startup_phases import StartUp, describe_phases, enter_phase


def test_startup_phases_are_recorded_and_reported_in_order():
    clock, notified = ManualClock(), []
    with StartUp(clock, deadline_s=60, notify=notified.append) as start:
        start.enter("first")
        clock.advance(1_500_000_000)
        enter_phase("second")
        clock.advance(250_000_000)
    enter_phase("nobody starts any more")
    assert notified == ["first", "second"] == [record.name for record in start.records]
    assert [record.took_s for record in start.records] == [1.5, 0.25]
    assert all(record.before_bytes > 1 << 20 for record in start.records)
    assert describe_phases(start.records).startswith("Started in 1.75 s: first 1.50 s +")


@pytest.mark.parametrize("error", [CapacityError("7 GB"), RuntimeError("melted")], ids=str)
def test_the_error_of_a_failed_start_names_the_phase_and_the_start_is_undone(error):
    undone = []
    with (
        pytest.raises((CapacityError, StartError)) as raised,
        StartUp(ManualClock(), deadline_s=60) as start,
    ):
        start.enter("plugins")
        start.undo(lambda: undone.append("plugins"))
        start.enter("load_model")
        start.undo(lambda: undone.append("model"))
        raise error
    assert undone == ["model", "plugins"]
    assert raised.value.phase == "load_model"
    assert "load_model" in str(raised.value) and str(error.args[0]) in str(raised.value)
    assert isinstance(raised.value, type(error)) or raised.value.__cause__ is error


def test_a_failure_during_cleanup_does_not_hide_the_first_error(caplog):
    undone = []

    def explode():
        raise OSError("no such thing")

    with pytest.raises(CapacityError), StartUp(ManualClock(), deadline_s=60) as start:
        start.undo(lambda: undone.append("first"))
        start.undo(explode)
        raise CapacityError("7 GB")
    assert undone == ["first"]
    assert "no such thing" in caplog.text


def test_an_interrupt_during_startup_is_raised_after_cleanup():
    undone = []
    with pytest.raises(KeyboardInterrupt), StartUp(ManualClock(), deadline_s=60) as start:
        start.undo(lambda: undone.append(1))
        raise KeyboardInterrupt
    assert undone == [1]


def test_a_successful_start_is_not_undone():
    undone = []
    with StartUp(ManualClock(), deadline_s=60) as start:
        start.undo(lambda: undone.append(1))
    assert undone == []


def test_a_long_startup_phase_is_logged(caplog):
    with StartUp(MonotonicClock(), deadline_s=60, report_s=0.05) as start:
        start.enter("load_model")
        time.sleep(0.2)
    notified = [record.getMessage() for record in caplog.records]
    assert 2 <= len(notified) <= 4
    assert all(
        "the phase load_model has taken" in item and "test_startup_phases" in item
        for item in notified
    )


def test_a_hanging_startup_phase_is_interrupted():
    started = time.monotonic()
    with pytest.raises(StartError) as raised, StartUp(MonotonicClock(), deadline_s=0.2) as start:
        start.enter("plugins")
        start.enter("load_model")
        time.sleep(30)
    assert time.monotonic() - started < 5
    message = str(raised.value)
    assert "within 0.2 s" in message and "load_model" in message
    assert "test_a_hanging_startup_phase_is_interrupted" in message, "where it was"
    assert signal.getsignal(signal.SIGURG) is signal.SIG_DFL


class Endless:
    def __init__(self, context):
        time.sleep(30)


def test_a_plugin_whose_constructor_hangs_is_not_reported_as_broken():
    with pytest.raises(StartError) as raised, StartUp(MonotonicClock(), deadline_s=0.2) as start:
        start.enter("load_model")
        construct("worker", Endless, ())
    message = str(raised.value)
    assert "start_timeout_s" in message and "load_model" in message
    assert "Endless" not in message and "test_startup_phases" in message, "where it was"


def test_the_error_for_a_plugin_whose_import_hangs_names_it(tmp_path, monkeypatch):
    (tmp_path / "hangs_at_import.py").write_text("import time\ntime.sleep(30)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(StartError) as raised, StartUp(MonotonicClock(), deadline_s=0.2) as start:
        start.enter("select_plugins")
        PluginRegistry().load("worker", "hangs_at_import:Worker")
    message = str(raised.value)
    assert (
        "The error occurred while importing hangs_at_import." in message
        and "start_timeout_s" in message
    )
    assert "hangs_at_import.py:2" in message, "where it was"


def test_a_startup_phase_in_another_thread_that_exceeds_its_deadline_is_logged(caplog):
    collected = []

    def run():
        with StartUp(MonotonicClock(), deadline_s=0.05) as start:
            start.enter("load_model")
            time.sleep(0.2)
        collected.extend(start.records)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [item.name for item in collected] == ["load_model"]
    assert "load_model has taken" in caplog.text
    assert not [item for item in threading.enumerate() if item.name == "start-watch"]
