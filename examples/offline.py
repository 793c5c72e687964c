"""Answer a list of prompts: python examples/offline.py MODEL_DIR."""

import sys

from dovetail import LLM, SamplingParams

prompts = ["the sea is", "a bird can", "in the old town"]
with LLM(sys.argv[1]) as llm:
    for output in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
