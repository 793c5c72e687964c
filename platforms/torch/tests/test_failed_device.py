"""The handle of a step on a device that has failed meanwhile, which its events tell."""

import pytest

from dovetail_torch.runner.late_output import LateOutput


class FailedEvent:
    """An event of a device that has failed: whoever asks is told."""

    def query(self):
        raise RuntimeError("an illegal memory access was encountered")

    synchronize = query


@pytest.mark.parametrize("timeout", [None, 5.0])
def test_a_failure_is_reported_by_the_result_each_time(timeout):
    output = LateOutput(FailedEvent(), (object(),), (object(),), lambda tensors: tensors)
    assert output.done()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            output.result(timeout)
    assert output._sources == ()
