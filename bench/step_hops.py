"""Follow one request through the files: `python bench/step_hops.py`.

A hop is a call from a function of one file to a function of another file of this repository. The
script runs one warm request of one output token on the demo model in this process, and prints the
hops of the life of the request, each once, in the order of first appearance; then the counts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

from dovetail import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[1]


class HopRecorder:
    """Records calls between files of the repository while it is active."""

    def __init__(self) -> None:
        self.hops: dict[tuple[str, str, str], int] = {}
        self._names: dict[str, str] = {}

    def __enter__(self) -> HopRecorder:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or frame.f_back is None:
            return
        callee = self._name(frame.f_code.co_filename)
        caller = self._name(frame.f_back.f_code.co_filename)
        if callee and caller and callee != caller:
            hop = (caller, callee, frame.f_code.co_qualname)
            self.hops[hop] = self.hops.get(hop, 0) + 1

    def _name(self, path: str) -> str:
        """Return the path below `src`, "" for a file that is not part of a package here."""
        if path not in self._names:
            inside = path.startswith(str(ROOT)) and "/src/" in path and ".venv" not in path
            self._names[path] = path.rpartition("/src/")[2] if inside else ""
        return self._names[path]


def main() -> None:
    """Print the hops of one request and how many there are."""
    params = SamplingParams(temperature=0.0, max_tokens=1)
    with LLM("demo", max_num_seqs=4) as llm:
        for number in range(4):  # warm: caches are filled, the shape of the step is recorded
            llm.generate(f"What is 1{number} + 22?", params)
        with HopRecorder() as recorder:
            llm.generate("What is 27 + 58?", params)
    for caller, callee, function in recorder.hops:
        print(f"{caller} → {callee}: {function}")
    files = {name for caller, callee, _ in recorder.hops for name in (caller, callee)}
    calls = sum(recorder.hops.values())
    print(f"\n{len(recorder.hops)} hops between {len(files)} files, {calls} calls")


if __name__ == "__main__":
    main()
