"""Checks a built site: `python docs/site/check.py site`.

The script prints the problems and exits with 1.

No page may load a resource from another host (scripts, styles, images, fonts, frames), and the
search index must contain every page.
"""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

LOADING = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src"}
"""Elements that load a resource, with the attribute that names it."""
HARMLESS = {"canonical", "prev", "next"}
"""Values of `rel` with which a <link> loads nothing."""
_CSS_URL = re.compile(r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)")


class ExternalResources(HTMLParser):
    """Collects the addresses on other hosts from which a page loads resources."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the address of an element that loads one."""
        values = dict(attrs)
        address = values.get(LOADING.get(tag, "")) or ""
        if address.startswith(("http://", "https://", "//")) and values.get("rel") not in HARMLESS:
            self.addresses.append(address)


def external_resources(page: str) -> list[str]:
    """Return the addresses on other hosts from which an HTML page loads resources."""
    parser = ExternalResources()
    parser.feed(page)
    return parser.addresses


def problems(site: Path) -> list[str]:
    """Return what is wrong with the built site, one sentence each."""
    pages = sorted(site.rglob("*.html"))
    sentences = [] if pages else [f"{site} contains no page"]
    for page in pages:
        for address in external_resources(page.read_text("utf-8")):
            sentences.append(f"{page.relative_to(site)} loads {address}")
    for style in sorted(site.rglob("*.css")):
        for address in _CSS_URL.findall(style.read_text("utf-8")):
            sentences.append(f"{style.relative_to(site)} loads {address}")
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    indexed = {entry["location"].partition("#")[0] for entry in index["docs"]}
    for page in pages:
        name = page.relative_to(site).as_posix()
        if name not in indexed | {"404.html"}:
            sentences.append(f"{name} is not in the search index")
    return sentences


def main() -> int:
    """Print the problems of the site. Return 1 if there are any."""
    sentences = problems(Path(sys.argv[1]))
    print(*sentences, sep="\n", end="\n" if sentences else "")
    return int(bool(sentences))


if __name__ == "__main__":
    raise SystemExit(main())
