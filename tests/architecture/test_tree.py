"""The repository contains no symbolic link and no absolute path of a developer's machine."""

from __future__ import annotations

import re
import stat
import subprocess
from pathlib import Path

import pytest

from architecture.sources import ROOT

HOME_PATH = re.compile(
    r"(?<![\w.~:/>-])/(?:home|root|Users|work|workspace|mnt|media|srv|opt|scratch)/\w"
)
"""An absolute path below a home directory, a mount or another directory of one machine."""

SYMLINK_MODE = "120000"


def symlinks(listing: str) -> list[str]:
    """Return the paths that `git ls-files -s` lists as symbolic links."""
    rows = (row.split(maxsplit=3) for row in listing.splitlines())
    return [path for mode, _, _, path in rows if mode == SYMLINK_MODE]


def machine_paths(text: str) -> list[str]:
    """Return the lines of `text` with an absolute path of one machine."""
    return [line.strip() for line in text.splitlines() if HOME_PATH.search(line)]


@pytest.fixture(scope="module")
def listing() -> str:
    """Return the tracked files, with their modes."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    done = subprocess.run(
        ["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_no_symbolic_link_is_tracked(listing: str) -> None:
    assert symlinks(listing) == []


def test_no_file_contains_an_absolute_path_of_a_machine(listing: str) -> None:
    collected = []
    for row in listing.splitlines():
        path = ROOT / row.split(maxsplit=3)[3]
        if path == Path(__file__) or not path.is_file():
            continue
        content = path.read_bytes()
        if b"\0" not in content:
            lines = machine_paths(content.decode("utf-8", "replace"))
            collected += [f"{path.relative_to(ROOT)}: {line[:120]}" for line in lines]
    assert collected == []


def test_git_ignores_build_directories_and_links_to_them(tmp_path: Path) -> None:
    """A pattern with a trailing slash ignores only directories, so git would commit a link."""
    ignored = (ROOT / ".gitignore").read_text("utf-8").splitlines()
    assert [line for line in ignored if line.startswith("/") and line.endswith("/")] == []
    assert "/.bench" in ignored


def test_links_and_machine_paths_are_reported(tmp_path: Path) -> None:
    link = tmp_path / "a link"
    link.symlink_to(tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
    done = subprocess.run(
        ["git", "ls-files", "-s"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert stat.S_ISLNK(link.lstat().st_mode)
    assert symlinks(done.stdout) == ["a link"]
    assert machine_paths("x = '/home/me/models'\ny = 'https://a/home/b'\nz = './home/x'") == [
        "x = '/home/me/models'"
    ]
