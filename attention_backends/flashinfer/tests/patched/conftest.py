"""Frees the memory of each test that uses reference kernels."""

import gc
import itertools

import pytest

_COLLECT_EVERY = 10
_tests = itertools.count(1)


@pytest.fixture(autouse=True)
def free_recorded_calls():
    """Drop the recorded plans and calls, whose tensors need more than 20 MiB for each test."""
    yield
    import reference_kernels
    import reference_tables

    for record in (
        reference_kernels.calls,
        reference_kernels.plans,
        reference_kernels.launches,
        reference_tables.table_launches,
    ):
        record.clear()
    if next(_tests) % _COLLECT_EVERY == 0:
        gc.collect()
