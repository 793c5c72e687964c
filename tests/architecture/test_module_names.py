"""A module is named with a noun for the one thing that it defines."""

import re

from architecture.sources import ROOT, relative, written_files

REFUSED = re.compile(r"(^|_)(utils?|helpers?|misc|common|v\d+)(_|$)", re.IGNORECASE)


def is_rejected(name: str) -> bool:
    return REFUSED.search(name) is not None


def test_no_module_has_a_name_such_as_utils():
    by_name = {
        relative(path)
        for path in written_files()
        if any(is_rejected(part) for part in path.relative_to(ROOT).with_suffix("").parts)
    }
    assert not by_name, (
        f"rename these modules after the one thing that they define: {sorted(by_name)}"
    )


def test_names_of_test_files_are_unique():
    names = [path.name for path in written_files() if path.name.startswith("test_")]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    assert not duplicates, f"rename these files, so that a report names only one file: {duplicates}"


def test_a_module_name_such_as_utils_is_reported():
    assert all(map(is_rejected, ("utils", "string_utils", "helper", "misc", "common", "V1", "v2")))
    assert not any(map(is_rejected, ("utilization", "commonality", "plan", "llama", "qwen2")))
