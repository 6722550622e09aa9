"""Small pictures and tables as HTML without scripts, for notebooks. They need no package, and are bounded in size."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

import numpy as np

from clearhead.base.output.pictures import Array, Panel
from clearhead.base.output.text import escaped, short

MASKED, NAN, LEAST = 0, 1, 2  # colours by number: grey, red, and then the ramp
RAMP = np.array([(247, 252, 240), (186, 228, 188), (67, 162, 202), (8, 64, 129)], dtype=float)
SIDE = 96  # pixels on the screen
ROWS = 40  # the most rows of a table


def picture(panel: Panel, floor: float) -> str:
    """An image of cells from 0 to 1, with its title: colours by their logarithm, from `floor` on."""
    cells = np.asarray(panel.cells, dtype=float)
    share = 1 - np.log(np.clip(np.nan_to_num(cells), floor, 1)) / np.log(floor)
    codes = (LEAST + np.rint(share * (255 - LEAST))).astype(np.uint8)
    codes[~np.isfinite(cells)] = NAN
    if panel.hidden is not None:
        codes[panel.hidden] = MASKED
    image = base64.b64encode(png(codes)).decode("ascii")
    title = escaped(panel.title)
    words = title or f"{codes.shape[0]} × {codes.shape[1]} cells"
    style = f"width:{SIDE}px;height:{SIDE}px;image-rendering:pixelated;border:1px solid #888"
    return (
        f'<figure style="display:inline-block;margin:4px"><img alt="{words}" style="{style}" '
        f'src="data:image/png;base64,{image}"><figcaption style="font-size:smaller">{title}</figcaption></figure>'
    )


def png(codes: Array) -> bytes:
    """A PNG of colours by number, uint8 (rows, columns)."""
    height, width = codes.shape
    at = np.linspace(0, len(RAMP) - 1, 256 - LEAST)
    ramp = np.stack([np.interp(at, np.arange(len(RAMP)), RAMP[:, c]) for c in range(3)], 1)
    palette = np.concatenate([[(200, 200, 200), (220, 40, 40)], ramp]).astype(np.uint8)
    lines = np.concatenate([np.zeros((height, 1), np.uint8), codes], 1)  # each begins with its filter: none
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", palette.tobytes()),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    )
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The first rows of a table, and how many there are."""
    look = 'style="padding:0.2em 0.6em;text-align:left;white-space:nowrap"'  # a table that is too wide scrolls
    head = "".join(f"<th {look}>{escaped(name)}</th>" for name in names)
    body = "".join(
        f"<tr>{''.join(f'<td {look}><bdi>{escaped(short(str(cell)))}</bdi></td>' for cell in row)}</tr>"
        for row in rows[:ROWS]
    )
    more = f"<p>… {len(rows) - ROWS} more</p>" if len(rows) > ROWS else ""
    return f'<div style="overflow-x:auto"><table><tr>{head}</tr>{body}</table></div>{more}'
