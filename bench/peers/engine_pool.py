"""Owns the loaded engines.

An engine starts when it is first used; its peak memory is recorded when it exits. The module does
not depend on cases. Every engine is a child process that serves the protocol.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cases import Case

from peers.child import Child
from peers.process_tree import peak_rss_mib
from peers.roster import Contender

CHECK = Case(name="check", prompt_lens=(32,) * 16, output_lens=(1,) * 16, seed=1)
"""Prompts that run once after loading and are not timed. No measured case uses their seed."""


class EnginePool:
    """Owns at most one child process per engine. seen: information on each loaded engine."""

    def __init__(self, checkpoint: Path, threads: int, deadline_s: float) -> None:
        """checkpoint: the model's directory; deadline_s: time limit of loading."""
        self._checkpoint, self._threads, self._deadline_s = checkpoint, threads, deadline_s
        self._children: dict[str, tuple[Child, str]] = {}
        self.seen: dict[tuple[str, str], dict[str, Any]] = {}

    def get(self, contender: Contender, weights: str) -> Child:
        """Return the child process of an engine, with a loaded model.

        If the model cannot be loaded, closes the child and raises ChildError.
        """
        if contender.name in self._children:
            return self._children[contender.name][0]
        child = Child(contender.python, contender.adapter, contender.env)
        self._children[contender.name] = (child, weights)
        response = self.load(child, contender, weights)
        about = {
            "engine": contender.name,
            "weights": weights,
            "versions": response["versions"],
            "peak_rss_mib": 0.0,
            "first_tokens": self._first_tokens(child),
        }
        self.seen.setdefault((contender.name, weights), about)
        return child

    def pids(self, but: Child | None = None) -> list[int]:
        """Return the top processes of all children except one."""
        return [child.pid for child, _ in self._children.values() if child is not but]

    def load(self, child: Child, contender: Contender, weights: str) -> dict[str, Any]:
        """Load the model of an engine in a child process. Return its response."""
        return child.ask(
            "load",
            self._deadline_s,
            model=contender.model_for(self._checkpoint, weights),
            weights=weights,
            threads=self._threads,
            options=dict(contender.options),
        )

    def _first_tokens(self, child: Child) -> list[int]:
        """Return the first tokens for fixed prompts, to check that engines run the same model."""
        response = child.ask(
            "generate",
            self._deadline_s,
            prompts=CHECK.prompts,
            output_lens=list(CHECK.output_lens),
        )
        tokens: list[int] = response["first_tokens"]
        return tokens

    def close(self, name: str) -> None:
        """Close the child process of an engine, if it exists, and record its peak memory."""
        if name not in self._children:
            return
        child, weights = self._children.pop(name)
        about = self.seen.get((name, weights))
        if about is not None:
            about["peak_rss_mib"] = max(about["peak_rss_mib"], peak_rss_mib(child.pid))
        child.close()

    def close_all(self, but: str | None = None) -> None:
        """Close all children except one."""
        for name in [name for name in self._children if name != but]:
            self.close(name)
