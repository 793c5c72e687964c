"""A ring reader in a child process. Arguments: INDEX MEMORY BELL COUNT.

Receives COUNT frames, prints their checksum and waits until stdin is closed.
"""

import sys
from zlib import crc32

from dovetail.transport.ring import RingReaderEnd

index, memory, wakeup, count = map(int, sys.argv[1:])
reader = RingReaderEnd(index=index, descriptors=(memory, wakeup)).take()
print("ready", flush=True)
checksum = 0
for _ in range(count):
    checksum = crc32(reader.receive(timeout_s=20), checksum)
print(checksum, flush=True)
sys.stdin.read()
