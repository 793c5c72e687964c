"""Write your own scheduling policy.

    python examples/own_policy.py [MODEL]

MODEL is a model directory; without it, the demo model answers. The policy ranks requests; the
scheduler owns rows, KV blocks and token budgets. A policy need not be installed: select it by the
name of its module, which must be on the import path.

    export PYTHONPATH=examples
    dovetail generate --model demo --scheduler-cls own_policy:ShortestPromptFirst "Spell fox."
"""

import sys

from dovetail import LLM, SamplingParams
from dovetail.interfaces import Policy, RequestView, SchedulerView


class ShortestPromptFirst(Policy):
    """Serves the shortest prompt first, and prompts of equal length in the order of arrival."""

    def rank(self, request: RequestView, view: SchedulerView) -> tuple[int, int]:
        """Return (prompt tokens, order of arrival): the lowest rank runs next."""
        return request.num_prompt_tokens, request.sequence


def main() -> None:
    """Run three prompts one at a time, and print them in the order in which they finished."""
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    prompts = [
        "Write the letters of puzzle, river and glass.",
        "Sort: queen, cloud, farm",
        "Spell fox.",
    ]
    params = SamplingParams(temperature=0.0, max_tokens=32)
    with LLM(model, scheduler_cls=ShortestPromptFirst, max_num_seqs=1) as llm:
        outputs = llm.generate(prompts, params)
    for output in sorted(outputs, key=lambda output: output.metrics.finished_ns or 0):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
