"""MkDocs hooks: pages outside docs/, the API reference, and the navigation.

Documents link files of the repository that are not in docs/, such as a member's README or a test.
The site contains these files as pages below `repository/`, so that it needs no other web site. The
navigation is the index by reader in docs/README.md.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
HOME, INDEX = "README.md", "docs/README.md"
"""Files of the repository that become the first page and the list of all documents."""
NAMES = {HOME: "index.md", INDEX: "documents.md"}
OUTSIDE = "repository"
REFERENCE = "reference"
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".sh": "bash", ".yaml": "yaml"}
MAX_CODE_BYTES = 200_000
"""A linked file that is larger is shown up to this size."""

_LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?(\))")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_TABLE_LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)\)")


def page_uri(path: str) -> str:
    """Return the site's source path of a file or directory of the repository."""
    if path in NAMES:
        return NAMES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{OUTSIDE}/{path}/index.md"
    return f"{OUTSIDE}/{path}" if path.endswith(".md") else f"{OUTSIDE}/{path}.md"


def linked_paths(path: str, text: str) -> Iterator[str]:
    """Yield the files and directories of the repository that the Markdown file `path` links."""
    for match in _LINK.finditer(_FENCE.sub("", text)):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        if not target.startswith("..") and (ROOT / target).exists():
            yield target


def with_site_links(path: str, text: str) -> str:
    """Return the Markdown text of the file `path` with links to the pages of the site."""

    def replaced(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        if target.startswith("..") or not (ROOT / target).exists():
            return match[0]  # MkDocs reports it
        uri = posixpath.relpath(page_uri(target), posixpath.dirname(page_uri(path)) or ".")
        return f"{match[1]}{uri}{match[3] or ''}{match[4]}"

    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(replaced, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(replaced, text[end:])])


def code_page(path: str) -> str:
    """Return a page that shows a file, or lists the files of a directory."""
    target = ROOT / path
    if target.is_dir():
        names = sorted(item.name for item in target.iterdir() if item.is_file())
        return "\n".join([f"# {path}", "", *(f"- `{name}`" for name in names), ""])
    text = target.read_bytes()[:MAX_CODE_BYTES].decode("utf-8", "replace")
    language = LANGUAGES.get(target.suffix, "text")
    return f"# {path}\n\n~~~~~~{language}\n{text}\n~~~~~~\n"


def public_names() -> dict[str, str]:
    """Return the public names of `dovetail`, each with the module that defines it."""
    tree = ast.parse((ROOT / "core/src/dovetail/__init__.py").read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_HOMES":
            homes: dict[str, str] = ast.literal_eval(node.value)
            return dict(sorted(homes.items()))
    raise LookupError("dovetail/__init__.py does not define _HOMES")


def reference_pages() -> Iterator[tuple[str, str]]:
    """Yield the pages of the API reference, each as (source path, Markdown text)."""
    names = "\n\n".join(f"::: {module}.{name}" for name, module in public_names().items())
    yield "dovetail.md", f"# dovetail\n\nThe public names of the package `dovetail`.\n\n{names}\n"
    yield "errors.md", "# dovetail.errors\n\n::: dovetail.errors\n"
    for path in sorted((ROOT / "core/src/dovetail/interfaces").glob("[a-z]*.py")):
        name = f"dovetail.interfaces.{path.stem}"
        yield f"interfaces/{path.stem}.md", f"# {name}\n\n::: {name}\n"


def navigation(config: MkDocsConfig) -> list[Any]:
    """Return the navigation: the sections of the index, then the API reference."""
    nav: list[Any] = [{"Home": NAMES[HOME]}]
    sections = re.split(r"^## ", (ROOT / INDEX).read_text("utf-8"), flags=re.MULTILINE)[1:]
    seen = {HOME, INDEX}
    for section in sections:
        title, _, body = section.partition("\n")
        pages = [NAMES[INDEX]] if len(nav) == 1 else []
        for row in body.splitlines():
            for link in _TABLE_LINK.findall(row.split("|")[1]) if row.startswith("|") else []:
                path = posixpath.normpath(f"docs/{link}")
                pages += [] if path in seen else [page_uri(path)]
                seen.add(path)
                if path == "docs/plugins/README.md" or path == "docs/schedulers.md":
                    pages += sorted(_folder_pages(path, seen))
        nav.append({title.strip(): pages})
    pages = [{Path(uri).stem: f"{REFERENCE}/{uri}"} for uri, _ in reference_pages()]
    nav.append({"API": pages})
    return nav


def _folder_pages(path: str, visited: set[str]) -> Iterator[str]:
    """Yield the pages of the directory that a page introduces."""
    folder = Path(path).parent if path.endswith("README.md") else Path(path).with_suffix("")
    for page in sorted((ROOT / folder).glob("*.md")):
        name = str(page.relative_to(ROOT))
        if name not in visited and name.count("/") == 2:
            visited.add(name)
            yield page_uri(name)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation."""
    config.nav = navigation(config)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the linked pages outside docs/ and the API reference."""
    files.remove(files.src_uris["README.md"])
    waiting = [HOME, INDEX, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        text = (ROOT / path).read_text("utf-8") if path.endswith(".md") else code_page(path)
        if page_uri(path) not in files.src_uris:
            in_nav = InclusionLevel.INCLUDED if path in NAMES else InclusionLevel.NOT_IN_NAV
            page = File.generated(config, page_uri(path), content=text, inclusion=in_nav)
            files.append(page)
        for target in linked_paths(path, text) if path.endswith(".md") else ():
            is_asset = target.startswith("docs/") and not target.endswith(".md")
            if target not in seen and not is_asset:
                seen.add(target)
                waiting.append(target)
    for uri, text in reference_pages():
        files.append(File.generated(config, f"{REFERENCE}/{uri}", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a document to pages of the site."""
    uri = page.file.src_uri
    if uri.startswith(f"{REFERENCE}/"):
        return markdown
    names = {value: key for key, value in NAMES.items()}
    path = names.get(uri) or (
        uri.removeprefix(f"{OUTSIDE}/") if uri.startswith(f"{OUTSIDE}/") else f"docs/{uri}"
    )
    if not (ROOT / path).is_file():
        return markdown  # the page of a source file or a directory
    return with_site_links(path, markdown)
