"""Drive the engine yourself, a step at a time: python examples/own_loop.py MODEL_DIR.

Requests may join at any step; here one is streamed, and another one joins while it runs.
"""

import sys

from dovetail import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams

engine = LLMEngine.from_engine_args(EngineArgs(sys.argv[1]))
params = SamplingParams(temperature=0.0, max_tokens=16)
engine.add_request("first", "the sea is", params, output_kind=RequestOutputKind.DELTA)

num_steps = 0
while engine.has_unfinished_requests():
    for output in engine.step():
        if output.request_id == "first":
            print("".join(answer.text for answer in output.outputs), end="", flush=True)
        elif output.finished:
            print(f"\n(second, in the meantime:{output.outputs[0].text})")
    num_steps += 1
    if num_steps == 4:
        kind = RequestOutputKind.FINAL_ONLY
        engine.add_request("second", "a bird can", params, output_kind=kind)
engine.shutdown()
