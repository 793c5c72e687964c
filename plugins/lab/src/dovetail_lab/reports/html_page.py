"""One HTML file without external requests: sections with text, tables and inline charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from dovetail_lab.reports.tables import TextTable

_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --text: #1d2430;
  --soft: #596273; --line: #e1e5ea; --head: #f1f4f7; --link: #0b5cad; --better: #00704a;
  --worse: #b3400a; --alert: #fff6e0; }
@media (prefers-color-scheme: dark) {
  :root { --page: #101214; --card: #1a1a1a; --text: #e3e6ea; --soft: #a3abb6; --line: #343a42;
    --head: #262a30; --link: #7db8f5; --better: #4cc79b; --worse: #f0956a; --alert: #3a3113; }
  section svg { filter: invert(0.9) hue-rotate(180deg); }
}
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; margin: 0;
  color: var(--text); background: var(--page); }
main { max-width: 1120px; margin: 0 auto; padding: 24px 24px 64px; }
h1 { font-size: 26px; margin: 8px 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 0 0 8px; }
nav { position: sticky; top: 0; background: var(--card); border-bottom: 1px solid var(--line);
  padding: 8px 24px; z-index: 2; white-space: nowrap; overflow-x: auto; }
nav a { margin-right: 18px; color: var(--link); text-decoration: none; font-size: 14px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 18px 20px; margin: 18px 0; scroll-margin-top: 48px; }
.scroll { overflow-x: auto; }
section svg { width: 100%; min-width: 680px; height: auto; display: block; }
p { margin: 6px 0 10px; max-width: 88ch; }
.note { color: var(--soft); font-size: 13.5px; }
.warning { background: var(--alert); border-left: 4px solid #e6a700; padding: 8px 12px; }
table { border-collapse: collapse; font-size: 13.5px; margin: 10px 0 16px; }
caption { text-align: left; font-weight: 600; padding: 4px 0; white-space: nowrap; }
th, td { padding: 5px 10px; border-bottom: 1px solid var(--line); text-align: right;
  font-variant-numeric: tabular-nums; vertical-align: top; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--card); }
thead th, thead th:first-child { background: var(--head); font-weight: 600; }
td.better { color: var(--better); } td.worse { color: var(--worse); }
td.unclear { color: var(--soft); }
details > summary { cursor: pointer; color: var(--link); }
pre { background: var(--head); padding: 10px 12px; border-radius: 6px; overflow-x: auto;
  font-size: 12.5px; }
@media (max-width: 600px) {
  main { padding: 12px 10px 40px; }
  nav { padding: 8px 10px; }
  section { padding: 14px 12px; }
  td:first-child { white-space: normal; min-width: 7em; }
}
"""


@dataclass(kw_only=True)
class Section:
    """A section of the page.

    paragraphs, warnings: plain text. tables: below the text. charts: <svg> elements, each with its
    caption. details: (summary, text) pairs that are initially collapsed.
    """

    title: str
    paragraphs: Sequence[str] = ()
    warnings: Sequence[str] = ()
    charts: list[tuple[str, str]] = field(default_factory=list)
    tables: list[TextTable] = field(default_factory=list)
    details: Sequence[tuple[str, str]] = ()

    @property
    def anchor(self) -> str:
        """The id of the section in the page."""
        return "".join(item if item.isalnum() else "-" for item in self.title.lower())


def render_page(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """Return the page. All strings are escaped; charts are inserted unchanged."""
    links = "".join(f'<a href="#{item.anchor}">{escape(item.title)}</a>' for item in sections)
    body = "\n".join(map(_section, sections))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<nav>{links}</nav>\n<main>\n<h1>{escape(title)}</h1>\n"
        f'<p class="note">{escape(subtitle)}</p>\n{body}\n</main>\n</body>\n</html>\n'
    )


def _section(section: Section) -> str:
    parts = [f'<section id="{section.anchor}">', f"<h2>{escape(section.title)}</h2>"]
    parts += [f"<p>{escape(text)}</p>" for text in section.paragraphs]
    parts += [f'<p class="warning">{escape(text)}</p>' for text in section.warnings]
    for svg, caption in section.charts:
        parts += [f'<div class="scroll">{svg}</div>', f'<p class="note">{escape(caption)}</p>']
    parts += [_table(table) for table in section.tables]
    parts += [
        f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"
        for summary, text in section.details
    ]
    return "\n".join([*parts, "</section>"])


def _table(table: TextTable) -> str:
    table = table.oriented()
    head = "".join(f"<th>{escape(heading)}</th>" for heading in table.headings)
    rows = "\n".join(
        "<tr>" + "".join(f"<td{_class(cell)}>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in table.rows
    )
    return (
        f'<div class="scroll"><table><caption>{escape(table.title)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>"
    )


def _class(cell: str) -> str:
    """Return the attribute that colors a verdict."""
    for ending, name in (
        ("better", "better"),
        ("worse", "worse"),
        ("not distinguishable", "unclear"),
    ):
        if cell.endswith(ending):
            return f' class="{name}"'
    return ""
