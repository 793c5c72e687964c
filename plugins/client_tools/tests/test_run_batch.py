"""`dovetail run-batch`: an invalid line affects no other line; interrupted runs continue."""

import json
import signal
import subprocess
import sys
import time

import pytest

from dovetail_client_tools.batch import input_file, remote_calls

COMPLETIONS = "/v1/completions"


def line(custom_id, **fields):
    body = {"prompt": "x", "max_tokens": 2}
    fields = {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body} | fields
    return json.dumps(fields)


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def records(path):
    return {item["id"]: item for item in map(json.loads, path.read_text().splitlines())}


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


@pytest.fixture
def serve(null):
    """Serve in a thread with a response for each body; return the address and the bodies."""

    def start(respond=None):
        bodies = []

        def reply(path, body):
            bodies.append(json.loads(body))
            if respond is not None:
                return respond(len(bodies))
            return null.whole(b'{\n"choices": []}', "application/json")

        return null.running(reply), bodies

    return start


def test_an_invalid_input_line_does_not_affect_other_lines(run, files, serve, monkeypatch):
    monkeypatch.setattr(input_file, "MAX_LINE_BYTES", 1000)
    source, output = files
    invalid = ("{", line("a"), line("c", url="/metrics"), line("d", body={"prompt": "x" * 2000}))
    write(source, line("a"), *invalid, "", line("b"))
    server, bodies = serve()
    with server as url:
        code, _, messages = run("run-batch", source, output, "--url", url)
    assert code == 1 and len(bodies) == 2
    done = records(output)
    codes = {name: item["error"] and item["error"]["code"] for name, item in done.items()}
    assert codes == {
        "batch_req_1": None,
        "batch_req_2": "invalid_json",
        "batch_req_3": "duplicate_custom_id",
        "batch_req_4": "invalid_url",
        "batch_req_5": "line_too_long",
        "batch_req_7": None,
    }
    assert done["batch_req_7"]["custom_id"] == "b"
    assert done["batch_req_7"]["response"]["status_code"] == 200
    assert done["batch_req_7"]["response"]["body"] == {"choices": []}
    assert "2 succeeded, 4 failed" in messages and "First failure: line 2: " in messages
    assert "6 of 6 lines" in messages


def test_a_resumed_batch_executes_only_the_lines_without_a_record(
    run, files, serve, null, monkeypatch
):
    monkeypatch.setattr(remote_calls, "FIRST_WAIT_S", 0)
    source, output = files
    write(source, *(line(f"r{i}") for i in range(5)))

    async def lose():
        yield None

    valid = null.whole(b"{}", "application/json")
    server, _ = serve(lambda number: valid if number <= 3 else lose())
    with server as url:
        code, _, messages = run("run-batch", source, output, "--url", url, "--concurrency", 1)
    assert code == 2 and "Continue with --resume" in messages
    assert len(records(output)) == 3
    with output.open("a") as file:
        file.write('{"id":"batch_req_4","cust')  # a killed process wrote a part of a record
    server, bodies = serve()
    with server as url:
        code, _, _ = run("run-batch", source, output, "--url", url)
        assert code == 2, "the output file exists"
        code, _, messages = run("run-batch", source, output, "--url", url, "--resume")
    assert code == 0 and len(bodies) == 2 and "3 of them earlier" in messages
    assert [records(output)[f"batch_req_{i + 1}"]["custom_id"] for i in range(5)] == [
        f"r{i}" for i in range(5)
    ]


def test_a_complete_batch_is_resumed_without_a_server(run, files, serve):
    source, output = files
    write(source, line("a"))
    server, _ = serve()
    with server as url:
        code, _, messages = run("run-batch", source, output, "--url", url)
    assert code == 0 and "1 of 1 line, 0 failed" in messages
    assert "1 line: 1 succeeded, 0 failed." in messages
    code, _, messages = run("run-batch", source, output, "--model", "nowhere", "--resume")
    assert code == 0 and "1 line, 1 of them earlier: 1 succeeded, 0 failed." in messages
    write(source, line("other"))
    code, _, messages = run("run-batch", source, output, "--model", "nowhere", "--resume")
    assert code == 2 and "'other'" in messages


def test_an_output_file_of_a_different_input_is_not_continued(run, files, serve):
    source, output = files
    server, _ = serve()
    with server as url:
        write(source, line("a"))
        assert run("run-batch", source, output, "--url", url)[0] == 0
        write(source, line("other"), line("b"))
        before = output.read_text()
        code, _, messages = run("run-batch", source, output, "--url", url, "--resume")
        assert code == 2 and "'other'" in messages and output.read_text() == before
        output.write_text("no record\n")
        code, _, messages = run("run-batch", source, output, "--url", url, "--resume")
        assert code == 2 and "Line 1 of" in messages and output.read_text() == "no record\n"
        assert run("run-batch", source, output, "--url", url, "--overwrite")[0] == 0
    assert len(records(output)) == 2


def test_an_endless_or_invalid_response_does_not_affect_other_lines(
    run, files, serve, null, monkeypatch
):
    monkeypatch.setattr(remote_calls, "MAX_RESPONSE_BYTES", 1 << 20)
    source, output = files

    async def endless():
        yield null.head("application/json", transfer_encoding="chunked")
        while True:
            yield b"10000\r\n" + b" " * 0x10000 + b"\r\n"

    replies = {
        1: lambda: endless(),
        2: lambda: null.whole(b"<html>", "text/html"),
        3: lambda: b"HTTP/9.9 what\r\n\r\n",
        4: lambda: null.whole(b'{"error": {"message": "no"}}', "application/json", "400 Bad"),
    }
    write(source, *(line(f"r{i}") for i in range(1, 6)))
    valid = null.whole(b"{}", "application/json")
    server, _ = serve(lambda number: replies[number]() if number in replies else valid)
    with server as url:
        code, _, _ = run("run-batch", source, output, "--url", url, "--concurrency", 1)
    assert code == 1
    items = records(output)
    codes = [item["error"]["code"] if item["error"] else "" for item in items.values()]
    assert codes == ["invalid_response"] * 3 + ["", ""]
    assert "more than 1,048,576 bytes" in items["batch_req_1"]["error"]["message"]
    assert items["batch_req_4"]["response"]["status_code"] == 400


@pytest.mark.costly
def test_ctrl_c_keeps_finished_lines(files, serve, null):
    source, output = files

    async def hang():
        yield null.head("application/json", content_length=10)

    valid = null.whole(b"{}", "application/json")
    server, bodies = serve(lambda number: valid if number <= 2 else hang())
    write(source, *(line(f"r{i}") for i in range(9)))
    with server as url:
        program = "import sys; from dovetail.cli.app import main; sys.exit(main())"
        words = ["run-batch", str(source), str(output), "--url", url, "--concurrency", "1"]
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", program, *words],
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 60
        while len(bodies) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, messages = process.communicate(timeout=60)
    assert process.returncode == 130 and "--resume" in messages
    assert len(records(output)) == 2


@pytest.mark.costly
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--model NAME"),
        (("--url", "127.0.0.1:9", "--model", "demo"), "--model has no effect"),
        (("--url", "127.0.0.1:9", "--resume", "--overwrite"), "not both"),
        (("--url", "127.0.0.1:9", "--concurrency", "0"), "--concurrency 0"),
        (("--url", "127.0.0.1:9"), "cannot be reached"),
    ],
)
def test_the_error_for_an_invalid_option_names_it(run, files, options, message):
    source, output = files
    write(source, line("a"))
    code, _, messages = run("run-batch", source, output, *options)
    assert code == 2 and message in messages


@pytest.mark.parametrize("name", ["/dev/zero", "absent", "empty"])
def test_the_error_for_an_unusable_input_names_the_file(run, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "empty")
    code, _, messages = run("run-batch", name, "out.jsonl", "--url", "127.0.0.1:9")
    assert code == 2 and f"'{name}'" in messages


@pytest.mark.costly
def test_an_engine_in_this_process_executes_the_lines(run, files):
    source, output = files
    body = {"prompt": "Anna", "max_tokens": 4, "temperature": 0}
    write(source, line("a", body=body), line("b", body={**body, "temperature": -1}))
    code, _, messages = run("run-batch", source, output, "--model", "demo", "--max-model-len", 512)
    assert code == 1 and "1 succeeded, 1 failed" in messages
    first, second = records(output)["batch_req_1"], records(output)["batch_req_2"]
    assert first["response"]["body"]["usage"]["completion_tokens"] == 4
    assert second["response"]["body"]["error"]["param"] == "temperature"
