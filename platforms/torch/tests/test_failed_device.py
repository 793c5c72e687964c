"""The handle to a step's result on a device that has failed."""

import pytest

from dovetail_torch.runner.late_output import LateOutput


class FailedEvent:
    """An event of a failed device: every call raises."""

    def query(self):
        raise RuntimeError("an illegal memory access was encountered")

    synchronize = query


@pytest.mark.parametrize("timeout", [None, 5.0])
def test_every_call_of_result_raises_the_error_of_the_device(timeout):
    output = LateOutput(FailedEvent(), (object(),), (object(),), lambda tensors: tensors)
    assert output.done()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            output.result(timeout)
    assert output._sources == ()
