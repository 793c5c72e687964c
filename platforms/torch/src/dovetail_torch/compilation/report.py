"""The report of a worker about the compilation of its model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class CompileReport:
    """Counts and times of the compilation of one model.

    num_graphs: graphs that torch has traced. num_compiled: graphs and pieces that the backend has
    compiled. num_shared: pieces that use the code of an equal piece. num_recompiled: graphs that
    were compiled in a step, after the start, while requests waited. trace_s: seconds of tracing,
    passes and splitting. compile_s: seconds of the backend. cache: "hit" if the files of an earlier
    start were restored, "miss", "damaged" if the files of an earlier start could not be used, or
    "off". cache_bytes: size of the restored or stored files.
    """

    level: str
    backend: str
    num_graphs: int = 0
    num_compiled: int = 0
    num_shared: int = 0
    num_recompiled: int = 0
    trace_s: float = 0.0
    compile_s: float = 0.0
    cache: str = "off"
    cache_bytes: int = 0

    def __str__(self) -> str:
        """Return one line for the log."""
        cache = {
            "hit": f"cache hit, {self.cache_bytes / 1e6:.1f} MB restored",
            "miss": f"cache miss, {self.cache_bytes / 1e6:.1f} MB stored",
            "damaged": f"damaged cache entry, {self.cache_bytes / 1e6:.1f} MB stored again",
            "off": "cache off",
        }[self.cache]
        return (
            f"Compiled the model with compile_level={self.level!r} and {self.backend}: "
            f"{self.num_compiled} graphs ({self.num_shared} more share their code), traced in "
            f"{self.trace_s:.1f} s, compiled in {self.compile_s:.1f} s ({cache})."
        )
