"""The admission time of a request, in the metrics of its outputs."""

from __future__ import annotations

from dovetail.engine.output.output_chunks import cut_outputs
from dovetail.interfaces.scheduler import EngineCoreOutputs
from dovetail.transport.messages import Outputs


def test_messages_and_output_chunks_keep_the_admission_times() -> None:
    outputs = EngineCoreOutputs(
        num_cached_tokens={"a": 1, "b": 2, "c": 3}, admitted_ns={"a": 10, "b": 20, "c": 30}
    )
    assert Outputs.of(outputs).columns().admitted_ns == outputs.admitted_ns
    merged: dict[str, int] = {}
    for chunk in cut_outputs(outputs, 1):
        assert chunk.admitted_ns.keys() == chunk.num_cached_tokens.keys()
        merged |= chunk.admitted_ns
    assert merged == outputs.admitted_ns
