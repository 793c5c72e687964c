"""Files and batches, with OpenAI's client: fields, pages, limits, keys, bad lines and errors."""

import http.client
import json
import time

import openai
import pytest

pytestmark = pytest.mark.costly  # the tests share servers

KEYS = ("key-of-anna", "key-of-ben")
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "reverse: robot, bank, window"}]
BODY = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0}
LONG = {**BODY, "max_tokens": 200, "ignore_eos": True}
MAX_FILE_BYTES, MAX_KEY_BYTES = 1 << 16, 1 << 18
WAIT_S = 60


def client_of(server, key):
    address = f"http://{server.host}:{server.port}/v1"
    return openai.OpenAI(base_url=address, api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def keyed_server(serving, folder):
    limits = ("--max-file-bytes", str(MAX_FILE_BYTES), "--max-stored-file-bytes")
    limits = (*limits, str(MAX_KEY_BYTES), "--max-unfinished-batches", "2")
    limits = (*limits, "--storage-dir", str(folder), "--max-num-seqs", "4")
    keys = [part for key in KEYS for part in ("--api-key", key)]
    with serving("--model", "demo", "--max-model-len", "512", *keys, *limits) as server:
        yield server.wait_until_ready()


@pytest.fixture(scope="module")
def anna(keyed_server):
    with client_of(keyed_server, KEYS[0]) as client:
        yield client


@pytest.fixture(scope="module")
def ben(keyed_server):
    with client_of(keyed_server, KEYS[1]) as client:
        yield client


@pytest.fixture(autouse=True)
def empty_store(anna, ben):
    """Complete all batches and delete all files after each test."""
    yield
    for client in (anna, ben):
        for batch in client.batches.list():
            if batch.status in ("validating", "in_progress"):
                client.batches.cancel(batch.id)
            wait_for(client, batch)
        for file in client.files.list():
            client.files.delete(file.id)


def line(custom_id, body=BODY, url=CHAT):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def upload(client, lines, **fields):
    content = lines if isinstance(lines, bytes) else "\n".join(lines).encode()
    return client.files.create(file=("lines.jsonl", content), purpose="batch", **fields)


def start(client, lines, endpoint=CHAT, **fields):
    file = upload(client, lines)
    window = {"completion_window": "24h"}
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, **window, **fields)


def wait_for(client, batch, statuses=("completed", "failed", "expired", "cancelled")):
    deadline = time.monotonic() + WAIT_S
    while (batch := client.batches.retrieve(batch.id)).status not in statuses:
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def records_of(client, file_id):
    lines = client.files.content(file_id).text.splitlines()
    return {record["custom_id"]: record for record in map(json.loads, lines)}


def test_a_file_is_stored_listed_read_and_deleted(anna):
    content = bytes(range(256)) * 200
    hour = {"anchor": "created_at", "seconds": 3600}
    file = upload(anna, content, expires_after=hour)
    assert (file.bytes, file.filename, file.purpose) == (len(content), "lines.jsonl", "batch")
    assert file.expires_at == file.created_at + 3600
    assert anna.files.retrieve(file.id) == file
    assert anna.files.content(file.id).read() == content
    others = [upload(anna, [str(i)]) for i in range(3)]
    everything = [item.id for item in [*others[::-1], file]]
    assert [item.id for item in anna.files.list()] == everything
    assert [item.id for item in anna.files.list(limit=1)] == everything  # the client reads 4 pages
    assert [item.id for item in anna.files.list(order="asc", limit=2)] == everything[::-1]
    assert not anna.files.list(purpose="vision").data
    assert anna.files.delete(file.id).deleted
    for use in (anna.files.retrieve, anna.files.delete, anna.files.content):
        with pytest.raises(openai.NotFoundError):
            use(file.id)


def test_a_batch_gets_the_same_responses_as_single_requests(anna):
    lines = [line("a"), line("b", {**BODY, "max_tokens": 6}), ""]
    batch = start(anna, lines, metadata={"job": "x"})
    assert (batch.object, batch.completion_window) == ("batch", "24h")
    assert batch.expires_at == batch.created_at + 86400 and batch.metadata == {"job": "x"}
    batch = wait_for(anna, batch)
    assert batch.status == "completed" and batch.error_file_id is None and batch.errors is None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (2, 2, 0)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    records = records_of(anna, batch.output_file_id)
    expected = anna.chat.completions.create(model="demo", **BODY)
    response = records["a"]["response"]
    assert response["status_code"] == 200 and records["a"]["error"] is None
    assert response["body"]["choices"][0]["message"]["content"] == (
        expected.choices[0].message.content
    )
    assert records["b"]["response"]["body"]["usage"]["completion_tokens"] == 6
    output = anna.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert batch.id in [item.id for item in anna.batches.list(limit=1)]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "Anna", "max_tokens": 4}),
        ("/v1/responses", {"input": "Anna", "max_output_tokens": 16, "store": False}),
    ],
)
def test_the_requests_of_a_batch_can_use_other_routes(anna, endpoint, body):
    batch = wait_for(anna, start(anna, [line("a", body, endpoint)], endpoint))
    record = records_of(anna, batch.output_file_id)["a"]
    assert record["response"]["body"]["id"].startswith(("cmpl", "resp"))


def test_an_invalid_line_of_a_batch_does_not_affect_other_lines(anna):
    lines = [
        line("good"),
        "{",
        line("url", url="/v1/completions"),
        line("field", {**BODY, "temperature": -1}),
        line("good"),
        line("stream", {**BODY, "stream": True}),
        "[" * 60_000,
        "\x00",
        line("also-good"),
    ]
    batch = wait_for(anna, start(anna, lines))
    assert batch.status == "completed"
    assert set(records_of(anna, batch.output_file_id)) == {"good", "also-good"}
    content = anna.files.content(batch.error_file_id).text.splitlines()
    errors = [(item["custom_id"], item["error"]) for item in map(json.loads, content)]
    codes = sorted((name, error["code"]) for name, error in errors if error is not None)
    assert codes == [
        ("", "invalid_json"),
        ("", "invalid_json"),
        ("", "invalid_json"),
        ("good", "duplicate_custom_id"),
        ("stream", "unsupported_parameter"),
        ("url", "invalid_url"),
    ]
    (field,) = [item for item in map(json.loads, content) if item["error"] is None]
    assert field["response"]["status_code"] == 400
    assert field["response"]["body"]["error"]["param"] == "temperature"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (9, 2, 7)


def test_a_cancelled_batch_has_a_record_for_every_line(anna):
    batch = start(anna, [line("first"), *(line(str(i), LONG) for i in range(30))])
    deadline = time.monotonic() + WAIT_S
    while not anna.batches.retrieve(batch.id).request_counts.completed:
        assert time.monotonic() < deadline
    with pytest.raises(openai.ConflictError) as caught:
        anna.files.delete(batch.input_file_id)
    assert caught.value.code == "file_in_use"
    assert anna.batches.cancel(batch.id).status == "cancelling"
    batch = wait_for(anna, batch)
    assert batch.status == "cancelled" and batch.cancelled_at >= batch.cancelling_at
    done, failed = (records_of(anna, i) for i in (batch.output_file_id, batch.error_file_id))
    assert "first" in done and len(done) + len(failed) == 31
    assert {record["error"]["code"] for record in failed.values()} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError):
        anna.batches.cancel(batch.id)


def test_client_requests_are_served_while_a_batch_runs(anna, keyed_server):
    """Half of the batch slots are free for clients, so their requests do not wait for lines."""
    batch = start(anna, [line(str(i), LONG) for i in range(60)])
    wait_for(anna, batch, ("in_progress",))
    for _ in range(5):
        anna.chat.completions.create(model="demo", **BODY)
    load = keyed_server.get("/load", Authorization=f"Bearer {KEYS[0]}").json
    assert anna.batches.retrieve(batch.id).status == "in_progress"
    assert load["server_load"] <= 2, load


def test_files_and_batches_of_another_key_are_not_found(anna, ben):
    batch = start(anna, [line("a")])
    file_id = batch.input_file_id
    for use, name in (
        (ben.files.retrieve, file_id),
        (ben.files.content, file_id),
        (ben.files.delete, file_id),
        (ben.batches.retrieve, batch.id),
        (ben.batches.cancel, batch.id),
        (
            lambda name: ben.batches.create(
                input_file_id=name, endpoint=CHAT, completion_window="24h"
            ),
            file_id,
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            use(name)
    assert not ben.files.list().data and batch.id not in [b.id for b in ben.batches.list()]
    assert wait_for(anna, batch).status == "completed"


def test_a_full_store_rejects_files_of_the_same_key_only(anna, ben):
    part = b"x" * (MAX_FILE_BYTES - 2000)
    files = [upload(anna, part) for _ in range(4)]
    with pytest.raises(openai.APIStatusError) as caught:
        upload(anna, part)
    assert (caught.value.status_code, caught.value.code) == (413, "storage_full")
    upload(ben, part)
    anna.files.delete(files[0].id)
    upload(anna, part)
    with pytest.raises(openai.APIStatusError) as caught:
        upload(ben, b"x" * (MAX_FILE_BYTES + 1))
    assert (caught.value.status_code, caught.value.code) == (413, "file_too_large")


def test_a_batch_whose_output_exceeds_the_store_fails_with_the_reason(anna):
    for _ in range(3):
        upload(anna, b"x" * (MAX_FILE_BYTES - 2000))
    body = {"prompt": ["A"] * 16, "max_tokens": 1}
    url = "/v1/completions"
    batch = wait_for(anna, start(anna, [line(str(i), body, url) for i in range(200)], url))
    assert batch.status == "failed", batch
    assert batch.errors.data[0].code == "storage_full"
    assert 0 < batch.request_counts.completed < 200
    assert len(records_of(anna, batch.output_file_id)) == batch.request_counts.completed


def test_the_number_of_unfinished_batches_per_key_is_limited(anna):
    started = [start(anna, [line(str(i), LONG) for i in range(30)]) for _ in range(2)]
    with pytest.raises(openai.RateLimitError) as caught:
        start(anna, [line("a")])
    assert caught.value.code == "too_many_batches"
    for batch in started:
        anna.batches.cancel(batch.id)
    assert {wait_for(anna, batch).status for batch in started} == {"cancelled"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "../../data.sqlite"}, "input_file_id"),
        ({"input_file_id": 5}, "input_file_id"),
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 5}},
            "output_expires_after.seconds",
        ),
        (
            {"output_expires_after": {"anchor": "now", "seconds": 3600}},
            "output_expires_after.anchor",
        ),
    ],
)
def test_the_error_for_an_invalid_batch_field_names_it(anna, keyed_server, fields, param):
    file = upload(anna, [line("a")])
    body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | fields
    reply = keyed_server.post("/v1/batches", body, Authorization=f"Bearer {KEYS[0]}")
    assert reply.status in (400, 404) and reply.error["param"] == param


def test_the_errors_for_an_invalid_endpoint_and_an_invalid_url_name_the_valid_routes(
    anna, keyed_server
):
    file = upload(anna, [line("a", {"prompt": "Anna"}, "/v1/completions")])
    body = {"input_file_id": file.id, "endpoint": "/v1/files", "completion_window": "24h"}
    reply = keyed_server.post("/v1/batches", body, Authorization=f"Bearer {KEYS[0]}")
    assert CHAT in reply.error["message"] and "/v1/embeddings" in reply.error["message"]
    batch = anna.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    batch = wait_for(anna, batch)
    assert f"url must be {CHAT} in" in anna.files.content(batch.error_file_id).text


def test_a_file_with_a_different_purpose_cannot_be_the_input_of_a_batch(anna):
    file = anna.files.create(file=("a", b"{}"), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match='upload it with "batch"') as caught:
        anna.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert caught.value.param == "input_file_id"


def form(*parts, boundary="b"):
    head = '--{}\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n{}\r\n'
    parts = [head.format(boundary, name, more, value) for name, more, value in parts]
    return "".join([*parts, f"--{boundary}--\r\n"]).encode()


FILE = ("file", '; filename="../../etc/passwd"', "x")
PURPOSE = ("purpose", "", "batch")
FORM = "multipart/form-data; boundary=b"


@pytest.mark.parametrize(
    ("kind", "body", "code"),
    [
        ("application/json", b"{}", "unsupported_media_type"),
        ("multipart/form-data", b"", "unsupported_media_type"),
        (f"{FORM}{'b' * 300}", b"", "unsupported_media_type"),
        (FORM, b"", "invalid_form"),
        (FORM, b"no form", "invalid_form"),
        (FORM, form(FILE, PURPOSE)[:-10], "invalid_form"),
        (FORM, form(*[PURPOSE] * 2), "invalid_value"),
        (FORM, form(FILE, FILE, PURPOSE), "invalid_value"),
        (FORM, form(FILE, ("purpose", "", "x" * 5000)), "invalid_value"),
        (FORM, form(FILE, ("purpose", "", "theft")), "invalid_value"),
        (FORM, form(FILE), "invalid_value"),
        (FORM, form(PURPOSE), "missing_required_parameter"),
        (FORM, form(("file", "", ""), PURPOSE), "invalid_value"),
        (FORM, form(FILE, PURPOSE, ("more", "", "x")), "unknown_parameter"),
        (FORM, form(FILE, PURPOSE, ("expires_after[seconds]", "", "9")), "invalid_value"),
        (FORM, form(("file", "x" * 9000, "x"), PURPOSE), "invalid_form"),
        (FORM, form(FILE, PURPOSE) + b"x" * (1 << 18), "file_too_large"),
    ],
)
def test_an_invalid_upload_form_is_rejected_and_leaves_no_file(
    keyed_server, anna, folder, kind, body, code
):
    headers = {"Content-Type": kind, "Authorization": f"Bearer {KEYS[0]}"}
    reply = keyed_server.send("POST", "/v1/files", body, headers)
    assert (reply.status in (400, 413, 415), reply.error["code"]) == (True, code), reply.content
    assert not anna.files.list().data and not list((folder / "files").glob("*"))


def test_directories_are_stripped_from_an_uploaded_file_name(keyed_server, anna):
    headers = {"Content-Type": FORM, "Authorization": f"Bearer {KEYS[0]}"}
    reply = keyed_server.send("POST", "/v1/files", form(FILE, PURPOSE), headers)
    assert reply.json["filename"] == "passwd"


def test_an_interrupted_upload_leaves_no_file(keyed_server, anna, folder):
    connection = http.client.HTTPConnection(keyed_server.host, keyed_server.port, timeout=WAIT_S)
    connection.putrequest("POST", "/v1/files")
    connection.putheader("Content-Type", FORM)
    connection.putheader("Authorization", f"Bearer {KEYS[0]}")
    connection.putheader("Content-Length", "60000")
    connection.endheaders(form(PURPOSE, FILE)[: -len("\r\n--b--\r\n")] + b"x" * 20_000)
    deadline = time.monotonic() + WAIT_S
    while not list((folder / "files").glob("*")):
        assert time.monotonic() < deadline
    connection.close()
    while list((folder / "files").glob("*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not anna.files.list().data


def test_stored_files_are_private(anna, folder):
    file = upload(anna, [line("a")])
    path = folder / "files" / file.id
    assert path.stat().st_mode & 0o077 == 0 and path.parent.stat().st_mode & 0o077 == 0
