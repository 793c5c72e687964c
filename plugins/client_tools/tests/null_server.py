"""A server that responds immediately with fixed bytes, in a separate process or in a thread.

Run as a program, it prints its port and serves until its standard input is closed.
"""

import asyncio
import json
import sys
import threading
from contextlib import contextmanager

MODELS = json.dumps({"object": "list", "data": [{"id": "null", "object": "model"}]}).encode()


def events(num_tokens, *, done=True, num_prompt=5):
    parts = [{"choices": [{"index": 0, "text": f" t{i}"}]} for i in range(num_tokens)]
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}
    parts.append({"choices": [], "usage": usage})
    lines = [b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts]
    return b"".join([*lines, b"data: [DONE]\n\n"] if done else lines)


def head(kind="text/event-stream", status="200 OK", **headers):
    lines = [f"HTTP/1.1 {status}", f"content-type: {kind}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def whole(body, kind="text/event-stream", status="200 OK", **headers):
    return head(kind, status, content_length=len(body), **headers) + body


class NullProtocol(asyncio.Protocol):
    """Responds to each request with `respond(path, body)`: bytes, or an async iterator of bytes."""

    def __init__(self, respond):
        self._respond = respond
        self._buffer = b""

    def connection_made(self, transport):
        self._transport = transport

    def data_received(self, data):
        self._buffer += data
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            lines = self._buffer[:end].split(b"\r\n")
            length = next(
                (int(line[15:]) for line in lines if line.lower().startswith(b"content-length:")), 0
            )
            if len(self._buffer) < end + 4 + length:
                return
            body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            self._reply(lines[0].split()[1].decode(), body)

    def _reply(self, path, body):
        content = whole(MODELS, "application/json") if path == "/v1/models" else None
        content = content or self._respond(path, body)
        if isinstance(content, bytes):
            self._transport.write(content)
        else:
            self._task = asyncio.ensure_future(self._stream(content))

    def abort(self):
        self._transport.abort()

    async def _stream(self, parts):
        async for part in parts:
            if part is None or self._transport.is_closing():
                self._transport.abort()
                return
            self._transport.write(part)
            while self._transport.get_write_buffer_size() > 1 << 20:
                await asyncio.sleep(0.001)


@contextmanager
def running(respond):
    """Serve in a thread. Yield the address."""
    loop, connections = asyncio.new_event_loop(), []

    def make():
        connections.append(NullProtocol(respond))
        return connections[-1]

    server = loop.run_until_complete(loop.create_server(make, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        for connection in connections:
            connection.abort()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()


def main(num_tokens):
    import uvloop

    content = whole(events(num_tokens))

    async def serve():
        loop = asyncio.get_running_loop()
        make = lambda: NullProtocol(lambda path, body: content)  # noqa: E731
        server = await loop.create_server(make, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await loop.run_in_executor(None, sys.stdin.read)

    uvloop.run(serve())


if __name__ == "__main__":
    main(int(sys.argv[1]))
