"""What Triton needs beside itself to start kernels."""

import pytest

from dovetail_ops_triton import availability


@pytest.mark.parametrize(
    ("variables", "found", "usable"),
    [({}, None, False), ({}, "gcc", True), ({}, "clang", True), ({"CC": "cc1"}, None, True)],
)
def test_triton_is_refused_where_it_finds_no_compiler(monkeypatch, variables, found, usable):
    monkeypatch.setattr(availability, "find_spec", lambda name: object())
    monkeypatch.setattr(availability, "which", lambda name: name if name == found else None)
    monkeypatch.delenv("CC", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    probe = availability.probe()
    assert probe.usable == usable
    assert usable or "C compiler, and there is none: install gcc" in probe.reasons[0]
