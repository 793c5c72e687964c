"""Drive the engine one step at a time, and add a request while another request runs.

    python examples/own_loop.py [MODEL]

MODEL is a model directory; without it, the demo model answers.
"""

import sys

from dovetail import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
engine = LLMEngine.from_engine_args(EngineArgs(model))
params = SamplingParams(temperature=0.0, max_tokens=32)
# DELTA outputs contain only the text and tokens since the previous output.
engine.add_request(
    "first", "Write the letters of puzzle.", params, output_kind=RequestOutputKind.DELTA
)

num_steps = 0
while engine.has_unfinished_requests():
    for output in engine.step():
        if output.request_id == "first":
            print("".join(response.text for response in output.outputs), end="", flush=True)
        elif output.finished:
            print(f"\n(the second request, meanwhile:{output.outputs[0].text})")
    num_steps += 1
    if num_steps == 4:
        engine.add_request("second", "Spell fox.", params, output_kind=RequestOutputKind.FINAL_ONLY)
print()
engine.shutdown()
