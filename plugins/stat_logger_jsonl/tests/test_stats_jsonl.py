"""Tests of the time, content and destination of the JSON lines."""

import json

import pytest
from pydantic import ValidationError

from dovetail.errors import ConfigError
from dovetail.interfaces import StatLoggerContext
from dovetail_devkit.suites.stat_logger import make_step
from dovetail_stats_jsonl import JSONLOptions, JSONLStatLogger

SECOND = 1_000_000_000


def make(**options):
    return JSONLStatLogger(
        StatLoggerContext(served_model_name="m", start_ns=5 * SECOND, options=options)
    )


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


def test_a_line_covers_the_time_since_the_previous_line(tmp_path):
    path = tmp_path / "stats.jsonl"
    logger = make(path=str(path), interval_s=2)
    for step_id, second in ((0, 6), (1, 7), (100, 8), (101, 11)):
        logger.record(
            make_step(step_id, second * SECOND, num_finished=1, num_failed=step_id == 100)
        )
    first, second = lines_of(path.read_text())  # the logger flushes each line
    assert first == {
        "time_s": 2.0,
        "num_steps": 2,
        "new_tokens_per_s": 8.0,
        "scheduled_tokens_per_s": 16.0,
        "num_running": 8,
        "num_waiting": 1,
        "kv_cache_usage": 0.25,
        "prefix_hit_rate": 0.25,
        "num_preemptions": 0,
        "num_recomputed_tokens": 0,
        "num_finished": 2,
        "num_failed": 0,
    }
    assert (second["time_s"], second["num_steps"], second["num_waiting"]) == (6.0, 2, 1)
    assert second["new_tokens_per_s"] == 4.0
    assert (second["num_preemptions"], second["num_recomputed_tokens"]) == (1, 10)
    assert (second["num_finished"], second["num_failed"]) == (2, 1)
    logger.close()
    assert len(lines_of(path.read_text())) == 2


def test_closing_writes_the_remaining_steps_once(tmp_path):
    path = tmp_path / "stats.jsonl"
    path.write_text('{"time_s": 0}\n')
    logger = make(path=str(path))
    logger.record(make_step(0, 6 * SECOND))
    assert len(lines_of(path.read_text())) == 1
    logger.close()
    logger.close()
    _, line = lines_of(path.read_text())  # the logger appends to the file
    assert (line["num_steps"], line["prefix_hit_rate"]) == (1, None)


def test_without_a_path_lines_are_written_to_stderr(capsys):
    logger = make(interval_s=0)
    logger.record(make_step(1, 5 * SECOND))
    (line,) = lines_of(capsys.readouterr().err)
    assert line["new_tokens_per_s"] is None  # no time has passed
    logger.close()
    assert capsys.readouterr().err == ""


def test_an_engine_without_steps_writes_no_line(capsys):
    make().close()
    assert capsys.readouterr().err == ""


def test_a_path_that_cannot_be_written_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        make(path=str(tmp_path / "nowhere" / "stats.jsonl"))


@pytest.mark.parametrize(
    "options", [{"interval_s": -1}, {"interval_s": float("nan")}, {"interval": 3}, {"path": 3}]
)
def test_invalid_options_are_rejected(options):
    with pytest.raises(ValidationError):
        JSONLOptions(**options)
