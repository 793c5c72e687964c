"""The store of responses, shared by two API processes."""

import asyncio

from dovetail_server.settings import ServerSettings
from dovetail_server.storage.database import Database
from dovetail_server.storage.responses import ResponseStore


def test_a_response_is_marked_as_failed_if_its_process_has_exited(tmp_path):
    async def run():
        settings = ServerSettings(storage_dir=str(tmp_path))
        first, second = Database(str(tmp_path)), Database(str(tmp_path))
        body = {"id": "resp_a", "status": "in_progress", "output": []}
        await ResponseStore(first, settings).put("key-a", body, b"[]")
        stored = await ResponseStore(second, settings).get("key-a", "resp_a")
        assert stored["status"] == "in_progress"
        first.close()  # releases the lock, as the end of the process does
        stored = await ResponseStore(second, settings).get("key-a", "resp_a")
        assert stored["status"] == "failed"
        assert "process" in stored["error"]["message"]
        second.close()

    asyncio.run(run())
