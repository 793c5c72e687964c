"""The style of all charts, and their conversion to PNG, SVG or a part of an HTML page."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#7a5195",
    "#5c5c5c",
    "#8c6d31",
    "#c5b000",
)
"""Colors that are safe for color-blind readers; less distinguishable from the ninth policy on."""
MARKERS = "osD^vPX*<>"
DPI = 160

_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica", "sans-serif"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",
    "figure.constrained_layout.use": True,
}


@contextmanager
def chart_style(name: str) -> Iterator[None]:
    """Apply the style of all charts; raise UserError if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError(
            "Charts need matplotlib. Run: pip install 'dovetail-lab[report]'."
        ) from error
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        yield


def new_figure(
    rows: int = 1, columns: int = 1, *, size: tuple[float, float] = (6.4, 3.6), **options: Any
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure and its axes, in row order. size: in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(axes.flat)


def color_of(index: int) -> str:
    """Return the color of the n-th policy, the same in all charts."""
    return COLORS[index % len(COLORS)]


def marker_of(index: int) -> str:
    """Return the marker of the n-th policy."""
    return MARKERS[index % len(MARKERS)]


def save_figure(figure: Figure, folder: Path, name: str) -> tuple[list[Path], str]:
    """Write NAME.png and NAME.svg. Return the paths, and the same element as `inline_svg`.

    The layout is computed only once, because it takes longer than drawing if there are many labels.
    """
    paths = [folder / f"{name}.{suffix}" for suffix in ("png", "svg")]
    text = _render_svg(figure, name)
    paths[1].write_text(text, "utf-8")
    figure.set_layout_engine("none")
    with chart_style(name):
        figure.savefig(paths[0], dpi=DPI)
    return paths, _as_element(text)


def inline_svg(figure: Figure, name: str) -> str:
    """Return the chart as an <svg> element without a fixed size, for an HTML page."""
    return _as_element(_render_svg(figure, name))


def _render_svg(figure: Figure, name: str) -> str:
    stream = io.StringIO()
    with chart_style(name):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()


def _as_element(text: str) -> str:
    """Return the <svg> element of an SVG file, without metadata and fixed size."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, count=1, flags=re.DOTALL)
    # The page sets the width; the viewBox keeps the proportions.
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    return text.strip()
