"""Answer a list of prompts.

    python examples/offline.py [MODEL]

MODEL is a model directory; without it, the demo model answers.
"""

import sys

from dovetail import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
prompts = ["What is 27 + 58?", "Spell fox.", "Sort: queen, cloud, farm"]
with LLM(model) as llm:
    for output in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=32)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
