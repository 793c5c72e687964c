"""The log of a program and of its child processes."""

import json
import subprocess
import sys

CODE = """
import logging
from dovetail.processes.log_output import configure_logs, configure_logs_of_child, LogOutput

root = logging.getLogger()
before = list(root.handlers), root.level
configure_logs("info", "{form}", more=("dovetail_server",))
logging.getLogger("dovetail.engine").info("of the core")
logging.getLogger("dovetail_server.x").info("of the server")
logging.getLogger("acme").info("hidden")
logging.getLogger("acme").warning("of a plugin")
assert (list(root.handlers), root.level) == before
assert LogOutput.for_children == "info {form}"
configure_logs_of_child(LogOutput.for_children)
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("dovetail").exception("of a child")
configure_logs_of_child("nonsense")
"""


def lines_of(form):
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(form=form)], capture_output=True, text=True, check=True
    )
    return done.stderr.splitlines()


def test_every_line_of_a_json_log_is_an_object():
    records = [json.loads(line) for line in lines_of("json")]
    messages = ["of the core", "of the server", "of a plugin", "of a child"]
    assert [record["message"] for record in records] == messages
    assert records[2]["level"] == "warning" and records[2]["logger"] == "acme"
    assert records[0]["time"].endswith("Z") and "ZeroDivisionError" in records[3]["exception"]


def test_a_line_of_a_text_log_has_time_level_and_message():
    first = lines_of("text")[0].split(None, 2)
    assert first[1:] == ["INFO", "of the core"] and first[0].count(":") == 2
