"""The tree in the README contains every package of the repository."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_package_is_in_the_tree_of_the_readme():
    readme = (ROOT / "README.md").read_text("utf-8")
    tree = readme.split("## Repository", 1)[1].split("```")[1]
    packages = [file.parent.relative_to(ROOT) for file in ROOT.glob("*/*/pyproject.toml")]
    packages += [file.parent.relative_to(ROOT) for file in ROOT.glob("*/pyproject.toml")]
    assert len(packages) > 20
    missing = [str(item) for item in packages if not re.search(rf"\b{item.name}\b", tree)]
    assert not missing
