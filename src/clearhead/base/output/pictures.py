"""Matrices drawn with matplotlib: one, or a grid of several with one scale and one colour bar."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clearhead.base.errors import ClearheadError, require
from clearhead.base.output.text import printable, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.colors import Colormap as Colormap
else:  # matplotlib is loaded when a picture is drawn
    Axes = Colormap = Any

Array = NDArray[Any]
MOST = 64  # pictures in a grid
WRITTEN = 8  # the most rows and columns whose cells have their numbers written in them
SMALLEST = 4.5  # points, of such a number
SMALL = 5.8  # points, of the words along a side: smaller letters are worse than every second word
LABEL = 40  # characters of a word beside a picture: matplotlib gives a label all the room that it takes


@dataclass(frozen=True)
class Panel:
    """One matrix, its masked cells, and its title."""

    cells: Array  # (rows, columns)
    hidden: Array | None = None  # bool, of the same shape
    title: str = ""


@dataclass(frozen=True)
class Side:
    """The rows, or the columns: `length` positions, each with a word or with none."""

    name: str
    length: int
    words: Sequence[str] | None = None
    argument: str = ""  # the name of the argument that gave the words


@dataclass(frozen=True)
class Style:
    """How a picture is drawn. `scale`: "linear" from 0, "log" from a tenth of an equal share, "signed" around 0, or a
    number: linear from 0 to this number. `bar`: whether a bar shows the colours. `lines`: whether a line stands between
    cells. `write`: how numbers are written in their cells, where they fit in this way."""

    title: str | None = None
    cmap: str | Colormap = "GnBu"
    scale: str | float = "linear"
    ax: Axes | None = None
    bar: bool = True
    lines: bool = False
    write: Callable[[float], str] | None = None


def check_style(style: Style, scales: Sequence[str] = ("linear", "log")) -> Any:
    """The colour map, or an error that names what is not valid; matplotlib's own for a colour map that it lacks."""
    matplotlib = require("matplotlib", "plot", "plot()")
    if style.title is not None and not isinstance(style.title, str):
        raise ClearheadError(f"title is a {type(style.title).__name__}; pass a string.")
    if not (_is_top(style.scale) or (isinstance(style.scale, str) and style.scale in scales)):
        known = " or ".join(map(repr, scales))
        raise ClearheadError(f"scale is {style.scale!r:.80}; expected {known}, or a number > 0.")
    return matplotlib.colormaps.get_cmap(style.cmap)


def _is_top(scale: Any) -> bool:
    return isinstance(scale, int | float) and not isinstance(scale, bool) and 0 < scale < math.inf


def draw(panels: Sequence[Panel], rows: Side, columns: Side, style: Style, meaning: str | None) -> Axes | np.ndarray:
    """Draw the panels, all with one scale. Gives the axes, an array of them where there are several. `meaning`: the
    words of the colour bar; None for no bar. Masked cells are hatched, NaN is red."""
    cmap, pyplot = check_style(style, ("linear", "log", "signed")), require("matplotlib.pyplot", "plot", "plot()")
    for side in (rows, columns):
        _check_words(side)
    if not 1 <= len(panels) <= MOST:
        raise ClearheadError(f"plot() draws 1 to {MOST} pictures, and these are {len(panels)}: choose some heads.")
    if style.ax is not None and len(panels) > 1:
        raise ClearheadError(f"these are {len(panels)} pictures, and one axes is given: choose one, or pass no ax.")
    axes = np.array([style.ax]) if style.ax is not None else _axes(pyplot, len(panels))
    norm, floor = _norm(panels, columns.length, style.scale)
    several = len(panels) > 1
    for axis, panel in zip(axes, panels, strict=True):
        drawn = _one(axis, panel, (rows.length, columns.length), norm, floor, cmap)
        title = panel.title if several or style.title is None else style.title
        axis.set_title(_plain(title), fontsize="medium" if several else None)
        _write_numbers(axis, panel, drawn, style.write)
        if style.lines:
            _draw_lines(axis, rows.length, columns.length)
    if several and style.title is not None:
        axes[0].figure.suptitle(_plain(style.title))
    _name_sides(axes, rows, columns)
    if meaning is not None and style.bar:
        masked = any(panel.hidden is not None and panel.hidden.any() for panel in panels)
        label = _plain(meaning) + (" (hatched: masked)" if masked else "")
        extend = "max" if any((panel.cells > norm.vmax).any() for panel in panels) else "neither"
        axes[0].figure.colorbar(drawn, ax=list(axes), label=label, extend=extend)
    return axes if several else axes[0]


def _axes(pyplot: Any, count: int) -> Array:
    """A figure with `count` axes that share their sides."""
    across = math.ceil(math.sqrt(count))
    down = -(-count // across)
    size = (6.4, 4.8) if count == 1 else (2.4 * across + 1.5, 2.4 * down + 1)
    _, grid = pyplot.subplots(down, across, squeeze=False, figsize=size, layout="constrained")
    for axis in grid.flat[count:]:
        axis.remove()
    found: Array = np.array(grid.flat[:count], dtype=object)
    return found


def _norm(panels: Sequence[Panel], length: int, scale: str | float) -> tuple[Any, float]:
    """The scale of all panels, and the least number that is drawn."""
    colors = require("matplotlib.colors", "plot", "plot()")
    if not isinstance(scale, str):
        return colors.Normalize(0.0, scale), -math.inf
    seen = [p.cells[np.isfinite(p.cells) & (True if p.hidden is None else ~p.hidden)] for p in panels]
    top = float(max((np.abs(cells).max() for cells in seen if cells.size), default=1.0)) or 1.0
    if scale == "log":
        floor = min(0.1 / max(length, 1), top / 10)
        return colors.LogNorm(floor, top), floor
    return colors.Normalize(-top if scale == "signed" else 0.0, top), -math.inf


def _one(axis: Any, panel: Panel, shape: tuple[int, int], norm: Any, floor: float, cmap: Any) -> Any:
    """One picture. Cells without a colour show the background, with hatching where they are masked."""
    matplotlib = require("matplotlib", "plot", "plot()")
    cells = panel.cells
    hidden = np.zeros(cells.shape, dtype=bool) if panel.hidden is None else panel.hidden
    extent = (-0.5, shape[1] - 0.5, shape[0] - 0.5, -0.5)
    how = {"extent": extent, "interpolation": "none", "aspect": "auto"}
    nan = ~np.isfinite(cells) & ~hidden
    masked = np.ma.masked_array(np.maximum(cells, floor), hidden | nan)
    drawn = axis.imshow(masked, cmap=cmap.with_extremes(bad=(0, 0, 0, 0)), norm=norm, **how)
    if hidden.any():
        behind = matplotlib.patches.Rectangle(
            (0, 0), 1, 1, transform=axis.transAxes, facecolor="0.95", edgecolor="0.7", hatch="////", lw=0, zorder=-1
        )
        axis.add_patch(behind)
    if nan.any():
        axis.imshow(np.ma.masked_array(nan, ~nan), cmap=matplotlib.colors.ListedColormap(["red"]), **how)
    return drawn


def _write_numbers(axis: Any, panel: Panel, drawn: Any, write: Callable[[float], str] | None) -> None:
    """The number of each cell, black or white, whichever is told better from the cell's colour; a masked 0 is 0.

    Nothing is written where there are many cells, where the numbers do not fit their cells, or would need more than
    four decimals. `write`: see `Style`.
    """
    if max(panel.cells.shape) > WRITTEN:
        return
    finite = np.isfinite(panel.cells)
    hidden = np.zeros(panel.cells.shape, dtype=bool) if panel.hidden is None else panel.hidden
    seen = panel.cells[finite & ~hidden]
    whole = bool((seen == np.round(seen)).all())
    top = np.abs(seen).max(initial=0.0)
    decimals = 0 if whole else max(2, 1 - math.floor(math.log10(top)))
    box, letter = axis.get_window_extent(), float(require("matplotlib", "plot", "plot()").rcParams["font.size"])
    high, wide = (
        72 / axis.figure.dpi * size / max(n, 1) for size, n in zip(box.size[::-1], panel.cells.shape, strict=True)
    )
    for said in (write, f"{{:.{decimals}f}}".format if decimals <= 4 else None):
        if said is None:
            continue
        words = np.array([[said(x) for x in row] for row in panel.cells])
        size = min(letter, 0.6 * high, 0.8 * wide / (0.6 * max(map(len, words.flat), default=1)))
        if size >= SMALLEST:
            break
    else:
        return
    colors = drawn.to_rgba(np.ma.masked_array(drawn.get_array()))[..., :3]
    linear = np.where(colors <= 0.04045, colors / 12.92, ((colors + 0.055) / 1.055) ** 2.4)
    dark = linear @ np.array([0.2126, 0.7152, 0.0722]) < 0.179  # where white has the better contrast
    how: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": size}
    plain = {"facecolor": "0.95", "edgecolor": "none", "pad": 1.0}  # no hatching behind the number
    for i, j in np.argwhere(finite & (~hidden | (panel.cells == 0))).tolist():
        if hidden[i, j]:
            axis.text(j, i, "0", color="black", bbox=plain, **how)
        else:
            axis.text(j, i, words[i, j], color="white" if dark[i, j] else "black", **how)


def _draw_lines(axis: Any, rows: int, columns: int) -> None:
    """A line between each two rows and each two columns."""
    axis.set_xticks(np.arange(columns - 1) + 0.5, minor=True)
    axis.set_yticks(np.arange(rows - 1) + 0.5, minor=True)
    axis.grid(which="minor", color="0.6", linewidth=0.6)
    axis.tick_params(which="minor", length=0)


def _name_sides(axes: Array, rows: Side, columns: Side) -> None:
    """Words, or numbers, along the outer sides of the grid."""
    grid = axes[0].get_gridspec() if len(axes) > 1 else None
    for i, axis in enumerate(axes):
        left = grid is None or i % grid.ncols == 0
        low = grid is None or i + grid.ncols >= len(axes)
        for side, way, outer in ((columns, axis.xaxis, low), (rows, axis.yaxis, left)):
            if outer:
                way.set_label_text(side.name)
            if side.words is not None:
                _set_words(axis, way, side, outer)
                continue
            locate = require("matplotlib.ticker", "plot", "plot()").MaxNLocator
            way.set_major_locator(locate("auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
            if not outer:
                way.set_tick_params(labelbottom=False, labelleft=False)


def _set_words(axis: Any, way: Any, side: Side, outer: bool) -> None:
    """As many words as there is room for, as large as they fit. Words of keys are upright where they are too wide."""
    assert side.words is not None
    place, figure, across = axis.get_position(), axis.figure, way is axis.xaxis
    pixels = figure.bbox.width * place.width if across else figure.bbox.height * place.height
    room = max(0.8 * 72 / figure.dpi * pixels, 1.0)  # points, without the room of a layout for names and the bar
    letter = float(require("matplotlib", "plot", "plot()").rcParams["font.size"])
    size = min(letter, max(room / (1.15 * max(side.length, 1)), SMALL))
    step = math.ceil(1.15 * size * side.length / room - 1e-9)
    words = [_plain(short(str(side.words[p]), LABEL)) for p in range(0, side.length, step)]
    widest = 0.65 * size * max(map(len, words), default=0)
    way.set_ticks(range(0, side.length, step), words if outer else [""] * len(words), fontsize=size)
    way.set_tick_params(rotation=90 if across and widest > room / max(len(words), 1) else 0)


def _check_words(side: Side) -> None:
    words, name = side.words, side.argument
    if words is None:
        return
    if not hasattr(words, "__len__") or getattr(words, "shape", None) == () or isinstance(words, type | str | bytes):
        raise ClearheadError(f"{name} is a {type(words).__name__}; pass a list of words, one a position.")
    if len(words) != side.length:
        raise ClearheadError(f"{name} has {len(words)} words for {side.length} positions; pass one for each.")


def _plain(text: str) -> str:
    """The text as matplotlib shows it: printable, so that an SVG is XML, and without mathematics, which is $…$."""
    return printable(text).replace("$", r"\$")
