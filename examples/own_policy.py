"""A scheduling policy of your own, in twenty lines: python examples/own_policy.py MODEL_DIR.

The policy says who is next; rows, KV blocks and budgets stay the scheduler's business. Without
installing anything it can be named from anywhere on the import path:

    export PYTHONPATH=examples
    dovetail generate --model DIR --scheduler-cls own_policy:ShortestPromptFirst "the sea is" "a"
"""

import sys

from dovetail import LLM, SamplingParams
from dovetail.interfaces import Policy, RequestView, SchedulerView


class ShortestPromptFirst(Policy):
    """Whoever asks least is served first; between equals, who came first."""

    def rank(self, request: RequestView, view: SchedulerView) -> tuple[int, int]:
        """Return (prompt tokens, place in the order of arrival): the lowest is next."""
        return request.num_prompt_tokens, request.sequence


def main() -> None:
    """Ask three prompts of an engine with one seat, and print them in the order of their ends."""
    prompts = ["a bird can see the sea and the land", "the sea is", "a"]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(sys.argv[1], scheduler_cls=ShortestPromptFirst, max_num_seqs=1) as llm:
        outputs = llm.generate(prompts, params)
    for output in sorted(outputs, key=lambda output: output.metrics.finished_ns or 0):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
