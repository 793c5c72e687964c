"""Blocks of the KV cache kept in the process's memory: `kv_connector="memory"`.

What falls out of the KV cache, or is forgotten by a reset, is loaded back instead of computed
again; engines of the same model in one process share what they have kept. It is also the example
for connectors: two sides that share no object, and bytes between them.
"""

from dovetail_kv_memory.connector import MemoryConnector, MemoryOptions

__all__ = ["MemoryConnector", "MemoryOptions"]
