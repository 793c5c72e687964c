"""The check for the C compiler that Triton needs to launch kernels."""

import pytest

from dovetail_ops_triton import availability


@pytest.mark.parametrize(
    ("variables", "actual", "usable"),
    [({}, None, False), ({}, "gcc", True), ({}, "clang", True), ({"CC": "cc1"}, None, True)],
)
def test_triton_is_rejected_without_a_c_compiler(monkeypatch, variables, actual, usable):
    monkeypatch.setattr(availability, "find_spec", lambda name: object())
    monkeypatch.setattr(availability, "which", lambda name: name if name == actual else None)
    monkeypatch.delenv("CC", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    probe = availability.probe()
    assert probe.usable == usable
    assert usable or "C compiler to launch kernels, and none was found" in probe.reasons[0]
