"""Record the calls between files for one request: `python bench/step_hops.py [--write]`.

A hop is a call from a function of one file to a function of another file of this repository. The
script runs one warm request of one output token on the demo model in this process. It prints each
hop of the request once, in the order of first appearance, and the counts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

from dovetail import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "step.md"
BEGIN, END = "<!-- recorded: hops -->", "<!-- end -->"


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
        """Return the path below `src`, "" for a file outside of the repository's packages."""
        if path not in self._names:
            inside = path.startswith(str(ROOT)) and "/src/" in path and ".venv" not in path
            self._names[path] = path.rpartition("/src/")[2] if inside else ""
        return self._names[path]


def follow_request() -> dict[tuple[str, str, str], int]:
    """Return the number of calls by (file of the caller, file of the function, function)."""
    params = SamplingParams(temperature=0.0, max_tokens=1)
    with LLM("demo", max_num_seqs=4, num_threads=1) as llm:
        for number in range(4):  # warm-up: fill caches, record the shape of the step
            llm.generate(f"What is 1{number} + 22?", params, use_tqdm=False)
        with HopRecorder() as recorder:
            llm.generate("What is 27 + 58?", params, use_tqdm=False)
    return recorder.hops


def summary(hops: dict[tuple[str, str, str], int]) -> str:
    """Return the counts as a sentence."""
    files = {name for caller, callee, _ in hops for name in (caller, callee)}
    num_calls = sum(hops.values())
    return f"The request makes {len(hops)} hops between {len(files)} files, in {num_calls} calls."


def main(arguments: list[str]) -> None:
    """Print the hops of one request, or with `--write` write their number to docs/step.md."""
    hops = follow_request()
    if arguments == ["--write"]:
        head, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}\n{summary(hops)}\n{END}{rest.partition(END)[2]}", "utf-8")
        return
    for caller, callee, function in hops:
        print(f"{caller} → {callee}: {function}")
    print(f"\n{summary(hops)}")


if __name__ == "__main__":
    main(sys.argv[1:])
