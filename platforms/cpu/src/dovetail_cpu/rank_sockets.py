"""Unix sockets between the ranks of one machine: creation and authentication.

A rank listens in a directory that only its user may enter, and stops listening when all other ranks
have connected. A connection without the token of this group is closed immediately. No network port
is opened at any time, and no other process can connect.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.clock import MonotonicClock
from dovetail.transport.private_folder import MAX_SOCKET_PATH_BYTES, make_private_folder

if TYPE_CHECKING:
    from torch.distributed import Store

_TOKEN_BYTES = 16
_HELLO_BYTES = _TOKEN_BYTES + 2
_HELLO_S = 5.0
"""Maximum time until a connection must have authenticated."""

_BUFFER_BYTES = 1 << 20
_MEETING = "dovetail_ranks"


def connect_ranks(
    store: Store, *, rank: int, size: int, timeout: timedelta
) -> dict[int, socket.socket]:
    """Return a connected socket to each other rank, by rank, with this `timeout`.

    store: the key-value store in which rank 0 publishes the directory and the token. Raises
    RuntimeError if the other ranks do not connect within `timeout`.
    """
    clock = MonotonicClock()
    deadline_ns = clock.now_ns() + int(timeout.total_seconds() * 1e9)
    folder, token = _agree(store, rank)
    ends: dict[int, socket.socket] = {}
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    address = folder / f"rank{rank}"
    try:
        listener.bind(str(address))
        address.chmod(0o600)
        listener.listen(size)
        store.set(address.name, b"listens")
        for other in range(rank):
            store.get(f"rank{other}")  # waits until that rank listens
            ends[other] = _connect(folder / f"rank{other}", rank, token)
        while len(ends) < size - 1:
            left_s = (deadline_ns - clock.now_ns()) / 1e9
            if left_s <= 0:
                raise TimeoutError("the timeout expired")
            listener.settimeout(left_s)
            end, _ = listener.accept()
            _admit(end, token, ends, range(rank + 1, size))
    except OSError as error:
        for end in ends.values():
            end.close()
        missing = sorted(set(range(size)) - {rank} - set(ends))
        raise RuntimeError(
            f"ranks {missing} did not connect to the sockets in {folder}: {error}"
        ) from error
    finally:
        listener.close()
        address.unlink(missing_ok=True)
        with suppress(OSError):  # other ranks' files still exist: the last rank removes it
            folder.rmdir()
    for end in ends.values():
        end.settimeout(timeout.total_seconds())
    return ends


def _agree(store: Store, rank: int) -> tuple[Path, bytes]:
    """Return the directory and the token that rank 0 has chosen."""
    if rank == 0:
        token = secrets.token_bytes(_TOKEN_BYTES)
        store.set(_MEETING, token + os.fsencode(_make_folder(store)))
    message = bytes(store.get(_MEETING))
    return Path(os.fsdecode(message[_TOKEN_BYTES:])), message[:_TOKEN_BYTES]


def _make_folder(store: Store) -> Path:
    """Return a new private directory for sockets, in the directory of the store if that is private.

    The engine removes the store's directory, so a rank that exits early leaves no directory behind
    there.
    """
    store_path = getattr(store, "path", "")
    parent = Path(store_path).parent
    folder = parent / "ranks"
    fits = len(os.fsencode(folder)) + len("/rank0000") <= MAX_SOCKET_PATH_BYTES
    if store_path and fits and not parent.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        folder.mkdir(mode=0o700)
        return folder
    return make_private_folder()


def _connect(address: Path, rank: int, token: bytes) -> socket.socket:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.connect(str(address))
    _enlarge(end)
    end.sendall(token + rank.to_bytes(2, "big"))
    return end


def _admit(
    end: socket.socket, token: bytes, ends: dict[int, socket.socket], expected: range
) -> None:
    """Store a connection by its rank if it sends the token. Otherwise close it."""
    end.settimeout(_HELLO_S)
    try:
        hello = end.recv(_HELLO_BYTES, socket.MSG_WAITALL)
    except OSError:
        hello = b""
    other = int.from_bytes(hello[_TOKEN_BYTES:], "big")
    is_known = len(hello) == _HELLO_BYTES and secrets.compare_digest(hello[:_TOKEN_BYTES], token)
    if is_known and other in expected and other not in ends:
        _enlarge(end)
        ends[other] = end
    else:
        end.close()


def _enlarge(end: socket.socket) -> None:
    """Request socket buffers for a step's tensors. The system may provide smaller buffers."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        end.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
