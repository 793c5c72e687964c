"""Frees the memory of each test over reference kernels."""

import gc

import pytest


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
    gc.collect()
