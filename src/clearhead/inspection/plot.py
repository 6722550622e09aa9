"""A picture of one head's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clearhead.base.errors import ClearheadError, require

CELLS = 512  # the most rows and columns drawn; beyond that, cells of the largest weight


def draw(
    image: Any, shape: tuple[int, int], query_labels: Sequence[str] | None, key_labels: Sequence[str] | None, ax: Any
) -> Any:
    """Draw (rows, columns) weights on a matplotlib axes, and give the axes."""
    pyplot = require("matplotlib.pyplot", "plot", "plot()")
    if ax is None:
        _, ax = pyplot.subplots()
    extent = (-0.5, shape[1] - 0.5, shape[0] - 0.5, -0.5)
    drawn = ax.imshow(image, cmap="GnBu", vmin=0.0, extent=extent, interpolation="nearest", aspect="auto")
    pooled = tuple(image.shape) != shape
    ax.figure.colorbar(drawn, ax=ax, label="largest weight in the cell" if pooled else "weight")
    ax.set_xlabel("key")
    ax.set_ylabel("query")
    for labels, size, name, axis in (
        (query_labels, shape[0], "query_labels", ax.yaxis),
        (key_labels, shape[1], "key_labels", ax.xaxis),
    ):
        if labels is not None:
            if not hasattr(labels, "__len__") or getattr(labels, "shape", None) == () or isinstance(labels, type):
                raise ClearheadError(f"{name} is a {type(labels).__name__}; pass a list of words, one a position.")
            if len(labels) != size:
                raise ClearheadError(f"{name} has {len(labels)} words for {size} positions; pass one for each.")
            # matplotlib would typeset $…$ as mathematics
            axis.set_ticks(range(size), [str(label).replace("$", r"\$") for label in labels])
    if key_labels is not None:
        ax.tick_params(axis="x", rotation=90)
    return ax
