"""Some changes of arguments must not cause a compilation within a step."""

from importlib.util import find_spec

import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
def test_the_alignment_of_a_column_does_not_cause_a_compilation():
    from dovetail_ops_triton.kernels.cuts import cuts_kernel
    from dovetail_ops_triton.kernels.drawing import draw_kernel

    for kernel in (cuts_kernel, draw_kernel):
        pointers = [item for item in kernel.params if item.name.endswith("_ptr")]
        kept = [pointer.name for pointer in pointers if not pointer.do_not_specialize_on_alignment]
        assert kept == ["logits_ptr"]
