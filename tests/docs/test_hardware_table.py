"""The README says what runs on each platform, as platforms and plugins declare it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dovetail.plugins import PluginRegistry

ROOT = Path(__file__).resolve().parents[2]
REGISTRY = PluginRegistry()
DEVICE = "device."
PLATFORMS = [item.name for item in REGISTRY.candidates("platform") if item.first_party]
NOT_FORMATS = {"dummy"}
"""Weight loaders that read no files."""
NOT_QUANTIZED = {"native", "onednn", "torch", "gguf"}
"""Linear methods that do not round weights while they are loaded."""
_CODE = re.compile(r"`(\w+)`")
_LINK = re.compile(r"\]\(([^)#]+)\)")


def rows():
    """Return the cells of each row of the table."""
    text = (ROOT / "README.md").read_text("utf-8")
    _, _, rest = text.partition("## Supported hardware\n")
    table, _, _ = rest.partition("\n## ")
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines[1:]]


def rows_of(platform):
    """Return the rows of a platform."""
    return [row for row in rows() if f"`{platform}`" in row[0]]


def plugins_on(platform, kind):
    """Return the first-party plugins of a kind that need no other device type."""
    names = set()
    for item in REGISTRY.candidates(kind):
        needs = REGISTRY.describe(kind, item.reference).entry.needs
        devices = {need for need in needs if need.startswith(DEVICE)}
        if item.first_party and devices <= {DEVICE + platform}:
            names.add(item.name)
    return names


def test_every_row_of_the_hardware_table_belongs_to_one_platform():
    assert sum(len(rows_of(platform)) for platform in PLATFORMS) == len(rows())


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_hardware_table_has_the_attention_backends_that_a_platform_prefers(platform):
    """All other backends in the table must support the platform's device type."""
    platform_cls = REGISTRY.load("platform", platform)
    listed = {name for row in rows_of(platform) for name in _CODE.findall(row[1])}
    assert set(platform_cls().prefer("attention")) <= listed
    for name in listed:
        types = REGISTRY.load("attention", name).capabilities.device_types
        assert not types or platform_cls.info.device_type in types, name


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_hardware_table_has_all_model_formats_of_a_platform(platform):
    formats = plugins_on(platform, "weight_loader") - NOT_FORMATS
    rounded = plugins_on(platform, "linear_method") - NOT_QUANTIZED
    for row in rows_of(platform):
        read, _, quantized = row[2].partition(";")
        assert set(_CODE.findall(read)) == formats
        assert set(_CODE.findall(quantized)) <= rounded
    listed = {name for row in rows_of(platform) for name in _CODE.findall(row[2].partition(";")[2])}
    assert listed == rounded


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_hardware_table_links_the_tests_of_a_platform(platform):
    for row in rows_of(platform):
        targets = _LINK.findall(row[3])
        assert targets and all((ROOT / target).exists() for target in targets)
