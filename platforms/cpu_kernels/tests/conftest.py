"""Fixtures of the kernels' tests: the levels of this CPU, and the library's state after a test."""

import pytest

import dovetail_cpu_kernels as native


@pytest.fixture
def restored():
    """Restore the level and use one thread after the test."""
    library = native.library()
    before = library.dk_level()
    yield
    library.dk_set_level(before)
    native.set_num_threads(1)


@pytest.fixture(params=native.usable_levels(), ids=lambda level: native.LEVELS[level])
def level(request, restored):
    """Select one of the levels that this CPU supports, for one test."""
    assert native.library().dk_set_level(request.param) == request.param
    return request.param
