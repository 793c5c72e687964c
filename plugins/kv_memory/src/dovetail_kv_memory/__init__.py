"""A KV connector that stores blocks in the memory of the process: `kv_connector="memory"`.

Blocks that were evicted from the KV cache or dropped by a reset are loaded instead of recomputed.
Engines of the same model in one process share the stored blocks. This package is also the example
for connectors: the scheduler side and the worker side share no object and exchange only bytes.
"""

from dovetail_kv_memory.connector import MemoryConnector, MemoryOptions

__all__ = ["MemoryConnector", "MemoryOptions"]
