"""Batches without a server: restarts, expiry, failing disks, batch slots, old and partial files."""

import asyncio
import json
import os
import sqlite3
from types import SimpleNamespace

import pytest

from dovetail_server.batches.batch import new_batch
from dovetail_server.batches.execution import BatchExecution
from dovetail_server.batches.free_batch_slots import FreeBatchSlots
from dovetail_server.batches.record_files import record_id
from dovetail_server.protocol.errors import APIError
from dovetail_server.settings import ServerSettings
from dovetail_server.storage.batches import BatchStore
from dovetail_server.storage.database import Database
from dovetail_server.storage.files import FileStore
from dovetail_server.transport.internal import InternalResponse

CHAT = "/v1/chat/completions"
OWNER = "key-a"
TOTAL = 20


class Calls:
    """A server that answers requests, but waits forever at request number `stuck_at`."""

    def __init__(self, stuck_at=None, busy=0):
        self.bodies, self.stuck_at, self.busy = [], stuck_at, busy
        self.is_stuck = asyncio.Event()

    async def post(self, path, body, *, caller="", request_id=""):
        assert (path, caller) == (CHAT, OWNER)
        if self.busy:
            self.busy -= 1
            return InternalResponse(status=503, headers={"retry-after": "0"}, body=b"{}")
        self.bodies.append(json.loads(body)["n"])
        if self.stuck_at is not None and len(self.bodies) >= self.stuck_at:
            self.is_stuck.set()
            await asyncio.Event().wait()
        return InternalResponse(status=200, body=b'{"done": true}')


def state_of(settings, *, num_seqs=8, running=0):
    config = SimpleNamespace(scheduler=SimpleNamespace(max_num_seqs=num_seqs))
    slot = SimpleNamespace(is_loaded=True, reported_problem="", llm=SimpleNamespace(config=config))
    admission = SimpleNamespace(num_running=running)
    return SimpleNamespace(settings=settings, slot=slot, admission=admission)


class Storage:
    """The stores of one process."""

    def __init__(self, folder, **settings):
        self.settings = ServerSettings(storage_dir=str(folder), **settings)
        self.database = Database(str(folder))
        self.files = FileStore(self.database, self.settings)
        self.batches = BatchStore(self.database, self.settings)

    async def upload(self, text):
        file_id = await self.files.reserve(OWNER, len(text))
        with self.files.create(file_id) as file:
            file.write(text)
        return (await self.files.finish(file_id, purpose="batch", name="a")).id

    async def add(self, num_lines=TOTAL, timeout_s=100):
        lines = [
            {"custom_id": str(n), "method": "POST", "url": CHAT, "body": {"n": n}}
            for n in range(num_lines)
        ]
        file_id = await self.upload("\n".join(map(json.dumps, lines)).encode())
        batch = new_batch(
            owner=OWNER, endpoint=CHAT, input_file_id=file_id, model="m", timeout_s=timeout_s
        )
        await self.batches.add(batch)
        return batch.id

    def execution(self, batch, calls):
        batch_slots = FreeBatchSlots(state_of(self.settings))
        return BatchExecution(
            batch, (self.batches, self.files), calls, batch_slots, self.settings, num_workers=3
        )

    def records(self, file_id):
        lines = self.files.path(file_id).read_text().splitlines()
        return [json.loads(item) for item in lines]


async def interrupt(storage, calls):
    """Execute a batch until a request is stuck, and stop there, as when a process exits."""
    batch = await storage.batches.claim()
    task = asyncio.create_task(storage.execution(batch, calls).run())
    await calls.is_stuck.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return batch


def test_a_batch_continues_after_its_process_has_exited(tmp_path):
    async def run():
        first, calls = Storage(tmp_path), Calls(stuck_at=8)
        batch_id = await first.add()
        batch = await interrupt(first, calls)
        path = first.files.path(batch.output_id)
        with path.open("ab") as file:
            file.write(b'{"id": "batch_req_x_99", "cus')  # the process ended in this record
        second = Storage(tmp_path)
        assert await second.batches.claim() is None  # the first process still runs
        first.database.close()
        again = Calls()
        claimed = await second.batches.claim()
        assert (claimed.id, claimed.status) == (batch_id, "in_progress")
        await second.execution(claimed, again).run()
        batch = await second.batches.get(OWNER, batch_id)
        assert (batch.status, batch.counts.completed, batch.error_file_id) == (
            "completed",
            TOTAL,
            None,
        )
        ids = sorted(int(item["custom_id"]) for item in second.records(batch.output_file_id))
        assert ids == list(range(TOTAL))
        assert len(again.bodies) < TOTAL and await second.batches.claim() is None
        second.database.close()

    asyncio.run(run())


def test_another_process_can_cancel_a_batch(tmp_path, monkeypatch):
    monkeypatch.setattr("dovetail_server.batches.execution.SAVE_S", 0.02)

    async def run():
        first, second, calls = Storage(tmp_path), Storage(tmp_path), Calls(stuck_at=5)
        batch_id = await first.add()
        task = asyncio.create_task(first.execution(await first.batches.claim(), calls).run())
        await calls.is_stuck.wait()
        assert (await second.batches.cancel(OWNER, batch_id)).status == "cancelling"
        await asyncio.wait_for(task, 60)
        batch = await second.batches.get(OWNER, batch_id)
        assert (batch.status, batch.counts.completed) == ("cancelled", 4)
        errors = {item["error"]["code"] for item in second.records(batch.error_file_id)}
        assert errors == {"batch_cancelled"} and batch.counts.failed == TOTAL - 4
        with pytest.raises(APIError, match="cannot be cancelled"):
            await second.batches.cancel(OWNER, batch_id)
        first.database.close()
        second.database.close()

    asyncio.run(run())


def test_the_requests_of_an_expired_batch_have_errors(tmp_path, monkeypatch):
    monkeypatch.setattr("dovetail_server.batches.execution.SAVE_S", 0.02)

    async def run():
        storage, calls = Storage(tmp_path), Calls(stuck_at=5)
        batch_id = await storage.add(timeout_s=1)
        batch = await storage.batches.claim()
        await storage.execution(batch, calls).run()
        batch = await storage.batches.get(OWNER, batch_id)
        assert batch.status == "expired" and "expired" in batch.times
        done, failed = (storage.records(i) for i in (batch.output_file_id, batch.error_file_id))
        assert len(done) == 4 and len(done) + len(failed) == TOTAL
        assert {item["error"]["code"] for item in failed} == {"batch_expired"}
        assert len({item["custom_id"] for item in done + failed}) == TOTAL
        storage.database.close()

    asyncio.run(run())


def test_a_batch_request_waits_while_the_server_is_busy(tmp_path):
    async def run():
        storage, calls = Storage(tmp_path), Calls(busy=30)
        batch_id = await storage.add(num_lines=2)
        await storage.execution(await storage.batches.claim(), calls).run()
        batch = await storage.batches.get(OWNER, batch_id)
        assert (batch.counts.completed, batch.counts.failed) == (2, 0)
        storage.database.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "settings", "code"),
    [
        (b"\n\n", {}, "empty_file"),
        (b"{}\n" * 4, {"max_batch_lines": 3}, "too_many_lines"),
        (None, {}, "file_not_found"),
    ],
)
def test_a_batch_with_an_invalid_file_fails_completely(tmp_path, text, settings, code):
    async def run():
        storage = Storage(tmp_path, **settings)
        file_id = await storage.upload(text or b"x")
        batch = new_batch(
            owner=OWNER, endpoint=CHAT, input_file_id=file_id, model="m", timeout_s=100
        )
        await storage.batches.add(batch)
        if text is None:
            storage.files.path(file_id).unlink()
        await storage.execution(await storage.batches.claim(), Calls()).run()
        failed = (await storage.batches.get(OWNER, batch.id)).object()
        assert (failed["status"], failed["errors"]["data"][0]["code"]) == ("failed", code)
        storage.database.close()

    asyncio.run(run())


def test_batches_of_the_api_key_with_the_fewest_running_batches_are_claimed_first(tmp_path):
    async def run():
        storage, owners = Storage(tmp_path), ("a", "a", "a", "b")
        for owner in owners:
            await storage.batches.add(
                new_batch(owner=owner, endpoint=CHAT, input_file_id="f", model="m", timeout_s=9)
            )
        claimed = [await storage.batches.claim() for _ in owners]
        assert [batch.owner for batch in claimed] == ["a", "b", "a", "a"]
        await storage.batches.release(claimed[0].id)
        assert (await storage.batches.claim()).id == claimed[0].id
        storage.database.close()

    asyncio.run(run())


def test_batch_requests_start_only_while_the_engine_has_free_batch_slots(tmp_path):
    async def run():
        settings = ServerSettings(batch_concurrency=3)
        state = state_of(settings, num_seqs=4, running=4)
        batch_slots, started, may_end = FreeBatchSlots(state), [], asyncio.Event()

        async def line(number):
            async with batch_slots.take():
                started.append(number)
                state.admission.num_running += 1
                await may_end.wait()
                state.admission.num_running -= 1

        async def check_started(numbers):
            async with asyncio.timeout(60):
                while len(started) < len(numbers):
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # time in which further lines could start
            assert started == numbers

        tasks = [asyncio.create_task(line(number)) for number in range(6)]
        await check_started([])  # clients use all batch slots
        state.admission.num_running = 2
        await check_started([0, 1])
        state.admission.num_running -= 2  # the clients' requests end
        await check_started([0, 1, 2])
        may_end.set()
        await asyncio.gather(*tasks)
        assert started == list(range(6))

    asyncio.run(run())


def test_old_files_and_uploads_of_ended_processes_are_deleted(tmp_path):
    async def run():
        first = Storage(tmp_path)
        kept = await first.upload(b"x")
        unfinished = await first.files.reserve(OWNER, 5)
        first.files.create(unfinished).close()
        second = Storage(tmp_path)
        await second.files.clean()
        assert second.files.path(unfinished).exists()  # the first process still runs
        first.database.close()
        old = await second.upload(b"y")
        await second.database.run(
            lambda db: db.execute("UPDATE files SET expires = 1 WHERE id = ?", (old,))
        )
        await second.files.clean()
        assert os.listdir(tmp_path / "files") == [kept]
        with pytest.raises(APIError):
            await second.files.get(OWNER, old)
        second.database.close()

    asyncio.run(run())


def test_files_in_upload_count_toward_the_limit_of_stored_files(tmp_path):
    async def run():
        storage = Storage(tmp_path, max_stored_files=2, max_stored_file_bytes=100)
        await storage.upload(b"x")
        upload = await storage.files.reserve(OWNER, 90)
        with pytest.raises(APIError) as caught:
            await storage.files.reserve(OWNER, 1)
        assert caught.value.code == "storage_full"
        await storage.files.discard(upload)
        with pytest.raises(APIError):
            await storage.files.reserve(OWNER, 100)
        await storage.files.reserve("another key", 100)
        storage.database.close()

    asyncio.run(run())


def test_a_batch_fails_if_the_disk_is_full(tmp_path, monkeypatch):
    def fail(*_):
        raise sqlite3.OperationalError("database or disk is full")

    async def run():
        storage = Storage(tmp_path)
        batch_id = await storage.add()
        batch = await storage.batches.claim()
        with monkeypatch.context() as patch:
            patch.setattr("dovetail_server.storage.files._usage", fail)
            await storage.execution(batch, Calls()).run()
        batch = await storage.batches.get(OWNER, batch_id)
        assert (batch.status, batch.failures[0].code) == ("failed", "storage_failed")
        storage.database.close()

    asyncio.run(run())


def test_the_id_of_a_record_names_the_batch_and_the_line():
    assert record_id("batch_5f", 7) == "batch_req_5f_7"
