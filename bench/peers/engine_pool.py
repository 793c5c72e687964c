"""The engines that are loaded: started when they are first needed, their memory noted at the end.

Does not depend on cases. Every engine is one child process that serves the protocol.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cases import Case

from peers.child import Child
from peers.process_tree import peak_rss_mib
from peers.roster import Contender

CHECK = Case(name="check", prompt_lens=(32,) * 16, output_lens=(1,) * 16, seed=1)
"""Asked once after loading, not timed. No prompt of a measured case has its seed."""


class EnginePool:
    """At most one child a contender. `seen`: what is known of each engine that was loaded."""

    def __init__(self, checkpoint: Path, threads: int, deadline_s: float) -> None:
        """checkpoint: the model's directory; deadline_s: for loading."""
        self._checkpoint, self._threads, self._deadline_s = checkpoint, threads, deadline_s
        self._children: dict[str, tuple[Child, str]] = {}
        self.seen: dict[tuple[str, str], dict[str, Any]] = {}

    def get(self, contender: Contender, weights: str) -> Child:
        """Return the contender's child with its model loaded.

        Raises ChildError if it does not load; it is closed then.
        """
        if contender.name in self._children:
            return self._children[contender.name][0]
        child = Child(contender.python, contender.adapter, contender.env)
        self._children[contender.name] = (child, weights)
        answer = self.load(child, contender, weights)
        about = {
            "engine": contender.name,
            "weights": weights,
            "versions": answer["versions"],
            "peak_rss_mib": 0.0,
            "first_tokens": self._first_tokens(child),
        }
        self.seen.setdefault((contender.name, weights), about)
        return child

    def pids(self, but: Child | None = None) -> list[int]:
        """Return the processes at the top of the children, but for one."""
        return [child.pid for child, _ in self._children.values() if child is not but]

    def load(self, child: Child, contender: Contender, weights: str) -> dict[str, Any]:
        """Let a child load the contender's model; return its answer."""
        return child.ask(
            "load",
            self._deadline_s,
            model=contender.model_for(self._checkpoint, weights),
            weights=weights,
            threads=self._threads,
            options=dict(contender.options),
        )

    def _first_tokens(self, child: Child) -> list[int]:
        """Return a token for each of some fixed prompts, to see who computes the same model."""
        answer = child.ask(
            "generate",
            self._deadline_s,
            prompts=CHECK.prompts,
            output_lens=list(CHECK.output_lens),
        )
        tokens: list[int] = answer["first_tokens"]
        return tokens

    def close(self, name: str) -> None:
        """End a contender's child, if there is one, and note its peak of memory."""
        if name not in self._children:
            return
        child, weights = self._children.pop(name)
        about = self.seen.get((name, weights))
        if about is not None:
            about["peak_rss_mib"] = max(about["peak_rss_mib"], peak_rss_mib(child.pid))
        child.close()

    def close_all(self, but: str | None = None) -> None:
        """End all children but one."""
        for name in [name for name in self._children if name != but]:
            self.close(name)
