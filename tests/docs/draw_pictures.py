"""Draws the SVG pictures of docs/pictures: `python tests/docs/draw_pictures.py`.

The pictures have light and dark colors, no scripts and no external resources.
`packages_before.json` and `packages_after.json` hold the size and the imports of each core package;
`--measure FILE` writes one from the working tree.
"""

from __future__ import annotations

import ast
import json
import sys
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
CORE = ROOT / "core/src/dovetail"

STYLE = """
  .bg{fill:#ffffff} .box{fill:#f2f5f9;stroke:#51637a} .owner{fill:#e3effb;stroke:#2a6db0}
  .plugin{fill:#fdf1dc;stroke:#b27a16} .end{fill:#e8f4ea;stroke:#3b8048}
  .t{fill:#16202c;font:600 14px system-ui,sans-serif}
  .s{fill:#3a4858;font:12px system-ui,sans-serif}
  .l{fill:#3a4858;font:11px system-ui,sans-serif} .a{stroke:#51637a;stroke-width:1.5;fill:none}
  .cycle{stroke:#c0392b;stroke-width:1.5;fill:none} .head{fill:#51637a}
  @media (prefers-color-scheme: dark){
  .bg{fill:#0f151c} .box{fill:#1b2530;stroke:#8499b3} .owner{fill:#16314c;stroke:#5fa3e6}
  .plugin{fill:#3a2d10;stroke:#d8a544} .end{fill:#173420;stroke:#6cb97a}
  .t{fill:#e8eef5} .s,.l{fill:#b6c3d1} .a{stroke:#8499b3} .head{fill:#8499b3}}
"""


class Picture:
    """An SVG picture of `width` × `height` pixels, built from boxes, strings and arrows."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._width, self._height, self._title = width, height, title
        self._parts: list[str] = []

    def box(
        self, at: tuple[int, int], size: tuple[int, int], texts: list[str], kind: str = "box"
    ) -> None:
        """Draw a box. The first string is its title, the others are lines below the title."""
        (x, y), (width, height) = at, size
        self._parts.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="7"/>'
        )
        top = y + 21 if len(texts) > 1 else y + height / 2 + 5
        for number, text in enumerate(texts):
            self.text(
                (x + width // 2, round(top + 18 * number)), text, "s" if number else "t", "middle"
            )

    def text(self, at: tuple[int, int], text: str, kind: str = "l", anchor: str = "start") -> None:
        """Write one line of text."""
        self._parts.append(
            f'<text class="{kind}" x="{at[0]}" y="{at[1]}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )

    def frame(self, at: tuple[int, int], size: tuple[int, int]) -> None:
        """Draw a red frame around packages that form an import cycle."""
        self._parts.append(
            f'<rect class="cycle" x="{at[0]}" y="{at[1]}" width="{size[0]}" height="{size[1]}" '
            'rx="9"/>'
        )

    def arrow(
        self, path: list[tuple[int, int]], label: str = "", at: tuple[int, int] | None = None
    ) -> None:
        """Draw an arrow through the points of `path`, with a label at `at`."""
        points = " ".join(f"{x},{y}" for x, y in path)
        self._parts.append(f'<polyline class="a" points="{points}" marker-end="url(#head)"/>')
        if label:
            (x1, y1), (x2, y2) = path[0], path[-1]
            self.text(at or ((x1 + x2) // 2, (y1 + y2) // 2 - 6), label, "l", "middle")

    def note(self, top: int, *lines: str) -> None:
        """Write lines below the picture."""
        for number, line in enumerate(lines):
            self.text((20, top + 20 * number), line)

    def svg(self) -> str:
        """Return the SVG file as a string."""
        head = (
            '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            'markerHeight="7" orient="auto-start-reverse">'
            '<path class="head" d="M0 0 10 5 0 10z"/></marker>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self._width} {self._height}" '
            f'width="{self._width}" height="{self._height}" role="img">'
            f"<title>{escape(self._title)}</title>"
            f"<style>{STYLE}</style><defs>{head}</defs>"
            f'<rect class="bg" width="{self._width}" height="{self._height}"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )


def draw_step() -> Picture:
    """One step: the data exchanged between the scheduler and the worker."""
    p = Picture(980, 340, "One step of the engine")
    p.box((20, 30), (150, 70), ["Input processor", "validate, tokenize"])
    p.box((210, 30), (170, 70), ["Request", "tokens, some computed"])
    p.box(
        (420, 20),
        (210, 90),
        ["Scheduler", "policy: who runs", "scheduler: rows, budget", "KV cache manager: blocks"],
        "owner",
    )
    p.box((700, 20), (110, 50), ["Executor"], "plugin")
    p.box((850, 20), (110, 50), ["Worker"], "plugin")
    p.box(
        (700, 120),
        (260, 100),
        [
            "Model runner",
            "execute_model: rows → inputs →",
            "attention metadata → model",
            "sample_tokens: masks → sampler",
        ],
        "plugin",
    )
    p.box((420, 220), (210, 70), ["Scheduler", "update_from_output"], "owner")
    p.box((210, 220), (170, 70), ["Output processor", "text, stop strings"])
    p.box((20, 220), (150, 70), ["RequestOutput", "text, logprobs"], "end")
    p.arrow([(170, 65), (208, 65)])
    p.arrow([(380, 65), (418, 65)])
    p.arrow([(630, 45), (698, 45)], "plan", (664, 38))
    p.text((640, 84), "columns: row,", "l")
    p.text((640, 100), "start, tokens", "l")
    p.arrow([(810, 45), (848, 45)])
    p.arrow([(905, 70), (905, 118)])
    p.arrow([(830, 220), (830, 255), (632, 255)])
    p.text((640, 275), "ModelRunnerOutput: tokens, columns", "l")
    p.arrow([(420, 255), (382, 255)])
    p.arrow([(210, 255), (172, 255)])
    p.note(
        308,
        "Blue: state of the scheduler. Yellow: selected plugins. A step has no phases:",
        "prefill, chunk, decode and draft verification are rows with a start and a token count.",
    )
    return p


def draw_processes() -> Picture:
    """The processes of an engine and the objects that each owns."""
    p = Picture(980, 400, "The processes and what each owns")
    p.box(
        (20, 20),
        (250, 92),
        [
            "Front end process A",
            "tokenizer, input processor,",
            "output processor, streams",
            "owns: its requests' text",
        ],
        "end",
    )
    p.box((20, 126), (250, 56), ["Front end process B", "its own requests only"], "end")
    p.box(
        (20, 214),
        (250, 74),
        ["Sandbox children", "chat templates, tokenizer.json", "limits: time, memory, no network"],
    )
    p.arrow([(145, 182), (145, 212)])
    engine = [
        "Engine process",
        "engine core: validates again",
        "scheduler owns requests, rows",
        "KV cache manager owns blocks",
        "executor owns the workers",
        "one channel per front end",
    ]
    p.box((370, 20), (250, 162), engine, "owner")
    p.box(
        (370, 214),
        (250, 74),
        ["Supervisor", "in a front end: wraps the channel,", "restarts a failed engine"],
    )
    worker = ["Worker process 0", "owns: weights, KV cache memory,", "token ids of the rows"]
    worker += ["attention backend, operations", "model runner, sampler"]
    p.box((720, 20), (240, 120), worker, "plugin")
    p.box((720, 160), (240, 56), ["Worker process 1 …", "one per tensor-parallel rank"], "plugin")
    p.arrow([(270, 60), (368, 60)], "ZMQ, msgpack", (319, 52))
    p.arrow([(368, 84), (272, 84)], "outputs", (319, 100))
    p.arrow([(270, 154), (368, 154)])
    p.arrow([(620, 60), (718, 60)], "ring: plans", (669, 52))
    p.arrow([(718, 84), (622, 84)], "results", (669, 100))
    p.arrow([(620, 130), (670, 130), (670, 188), (718, 188)])
    p.arrow([(495, 214), (495, 184)], "")
    p.note(
        320,
        "In one process (the default of LLM) the same objects run without ZMQ and without rings.",
        "dovetail.processes starts every child and ends it when its parent exits.",
        "If a front end exits, only its own requests are aborted.",
        "If a worker exits, the engine ends, and the supervisor starts another engine.",
    )
    return p


def draw_states() -> Picture:
    """The states of a request and the transitions between them."""
    p = Picture(900, 340, "The states of a request")
    p.box((20, 120), (130, 50), ["new request"])
    p.box((210, 120), (130, 50), ["WAITING"], "owner")
    p.box((180, 20), (190, 50), ["WAITING_FOR_FSM"], "owner")
    p.box(
        (430, 12), (240, 60), ["WAITING_FOR_REMOTE_KVS", "a KV connector loads its blocks"], "owner"
    )
    p.box((450, 120), (130, 50), ["RUNNING"], "owner")
    p.box((450, 230), (130, 50), ["PREEMPTED"], "owner")
    p.box((690, 105), (190, 80), ["FINISHED_…", "STOPPED, LENGTH_CAPPED,", "ABORTED, ERROR"], "end")
    p.arrow([(150, 145), (208, 145)])
    p.arrow([(255, 118), (255, 72)], "held", (232, 100))
    p.arrow([(295, 72), (295, 118)], "ready", (320, 100))
    p.arrow([(340, 130), (400, 130), (400, 45), (428, 45)])
    p.arrow(
        [(470, 72), (470, 92), (366, 92), (366, 160), (342, 160)], "loaded, or failed", (418, 107)
    )
    p.arrow([(340, 145), (448, 145)], "admitted", (408, 160))
    p.arrow([(490, 172), (490, 228)], "preempted", (455, 205))
    p.arrow([(540, 228), (540, 172)], "resumed", (570, 205))
    p.arrow([(582, 145), (688, 145)], "stop, length", (635, 138))
    p.arrow([(580, 255), (785, 255), (785, 187)], "last token arrives, abort, error", (680, 248))
    p.note(
        306,
        "An abort or an error ends a request in every state.",
        "life_cycle.py has the table of transitions; no other code changes a status.",
    )
    return p


def measure_packages(core: Path = CORE) -> dict[str, dict[str, Any]]:
    """Return each core package with its files, its lines and the packages that it imports."""
    packages: dict[str, dict[str, Any]] = {}
    names = {path.name for path in core.iterdir() if path.is_dir()}
    for path in sorted(core.rglob("*.py")):
        parts = path.relative_to(core).parts
        package = parts[0] if len(parts) > 1 else "(top level)"
        entry = packages.setdefault(package, {"files": 0, "lines": 0, "imports": []})
        text = path.read_text("utf-8")
        entry["files"] = entry["files"] + 1
        entry["lines"] = entry["lines"] + text.count("\n")
        by_name = {name for node in ast.walk(ast.parse(text)) for name in _imported(node)}
        targets = {name.split(".")[1] for name in by_name if name.startswith("dovetail.")} & names
        entry["imports"] = sorted({*entry["imports"], *targets} - {package})
    return packages


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and node.module:
        if node.module == "dovetail":
            return [f"dovetail.{alias.name}" for alias in node.names]
        return [node.module]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def draw_packages(name: str, title: str) -> Picture:
    """The packages of the core by layers. A red frame encloses packages in an import cycle."""
    packages = json.loads((FOLDER / name).read_text("utf-8"))
    graph = {
        package: {other for other in value["imports"] if other in packages}
        for package, value in packages.items()
        if package != "(top level)"
    }
    layers = _layers(graph)
    width, height, gap = 190, 52, 44
    columns = max(sum(len(group) for group in layer) for layer in layers)
    p = Picture(40 + columns * (width + 20), 150 + (height + gap) * len(layers), title)
    lines = sum(value["lines"] for value in packages.values())
    files = sum(value["files"] for value in packages.values())
    p.text((20, 28), f"{title}: {lines:,} lines in {files} files", "t")
    index = _places(p, layers, (width, height, gap))
    for package, (x, y) in index.items():
        for other in sorted(graph[package]):
            ox, oy = index[other]
            if 0 < oy - y <= height + gap:
                p.arrow([(x + width // 2, y + height), (ox + width // 2, oy - 2)])
        value = packages[package]
        kind = "owner" if package == "interfaces" else "box"
        p.box(
            (x, y),
            (width, height),
            [package, f"{value['lines']:,} lines, {value['files']} files"],
            kind,
        )
    value = packages["(top level)"]
    y = 50 + (height + gap) * len(layers)
    size = (columns * (width + 20) - 20, 40)
    p.box((20, y), size, [f"modules of dovetail: {value['lines']:,} lines, {value['files']} files"])
    p.note(
        y + 62,
        "A package imports packages below it; arrows show imports of the next layer.",
        "Red frame: packages in an import cycle.",
    )
    return p


def _places(
    p: Picture, layers: list[list[list[str]]], sizes: tuple[int, int, int]
) -> dict[str, tuple[int, int]]:
    width, height, gap = sizes
    index: dict[str, tuple[int, int]] = {}
    for row, layer in enumerate(layers):
        x, y = 20, 50 + row * (height + gap)
        for group in layer:
            if len(group) > 1:
                p.frame((x - 8, y - 8), (len(group) * (width + 20) - 4, height + 16))
            for package in group:
                index[package] = (x, y)
                x += width + 20
    return index


def _layers(graph: dict[str, set[str]]) -> list[list[list[str]]]:
    """Return the layers, top first, as lists of groups. A group is one package or a cycle."""
    reach = {package: _reachable(graph, package) for package in graph}
    group = {
        package: tuple(
            sorted(
                o for o in graph if o == package or (o in reach[package] and package in reach[o])
            )
        )
        for package in graph
    }
    depth: dict[tuple[str, ...], int] = {}

    def find(members: tuple[str, ...]) -> int:
        if members not in depth:
            below = {group[o] for member in members for o in graph[member]} - {members}
            depth[members] = 1 + max((find(other) for other in below), default=-1)
        return depth[members]

    groups = sorted(set(group.values()))
    top = max(find(members) for members in groups)
    return [[list(m) for m in groups if depth[m] == level] for level in range(top, -1, -1)]


def _reachable(graph: dict[str, set[str]], package: str) -> set[str]:
    actual: set[str] = set()
    pending = [package]
    while pending:
        for other in graph[pending.pop()] - actual:
            actual.add(other)
            pending.append(other)
    return actual


def pictures() -> dict[str, str]:
    """Return all pictures as a map from file name to text."""
    return {
        "step.svg": draw_step().svg(),
        "processes.svg": draw_processes().svg(),
        "request_states.svg": draw_states().svg(),
        "packages_before.svg": draw_packages("packages_before.json", "Core packages before").svg(),
        "packages_after.svg": draw_packages("packages_after.json", "Core packages after").svg(),
    }


def main(arguments: list[str]) -> None:
    """Write the pictures, or with `--measure FILE` the sizes and imports of the core's packages."""
    if arguments[:1] == ["--measure"]:
        Path(arguments[1]).write_text(json.dumps(measure_packages(), indent=1) + "\n", "utf-8")
        return
    for name, text in pictures().items():
        (FOLDER / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
