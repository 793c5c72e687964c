"""Every link in a document has a target, and the numbers in docs/cpu.md match the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "bench" / "README.md"])

_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_in_documents_have_targets(page):
    links = _LINK.findall(page.read_text("utf-8"))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def test_the_link_check_finds_all_forms_of_links():
    text = "[a](x.md) and [b](../y.md#part), not [c](https://example.org) or [d](#here)"
    assert _LINK.findall(text) == ["x.md", "../y.md"]


def test_the_numbers_on_the_cpu_page_match_the_code():
    options = pytest.importorskip("dovetail_cpu.options")
    native_library = pytest.importorskip("dovetail_cpu.native_library")
    folder = pytest.importorskip("dovetail_cpu.packed_cache.folder")
    kernels = pytest.importorskip("dovetail_cpu_kernels.library")
    replay = pytest.importorskip("dovetail_cpu.replay")
    text = (ROOT / "docs" / "cpu.md").read_text("utf-8")
    defaults = options.CPUWorkerOptions()
    stated = [
        native_library.LEVEL_VARIABLE,
        folder.CACHE_VARIABLE,
        f"{defaults.packed_cache_gib:.0f} GiB (`packed_cache_gib`)",
        f"Models below {defaults.packed_cache_min_mib} MiB",
        f"groups of {options.Int4Options().group_size}",
        f"up to {replay.MAX_TOKENS} tokens",
        f"{replay.ARENA_BYTES >> 20} MiB for intermediate results",
        f"at most {kernels.MAX_THREADS}",
        *(f"`{level}`" for level in kernels.LEVELS),
    ]
    assert [words for words in stated if words not in " ".join(text.split())] == []
