"""The recorded calls of a model as pages, pictures, explanations and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from clearhead.base.arrays import Array
from clearhead.base.errors import ClearheadError, ShapeError, require
from clearhead.base.output.pictures import Axes, Colormap, Panel, Side, Style, check_style, draw
from clearhead.base.output.words import TokensLike, word_list
from clearhead.base.selected import as_index
from clearhead.explanation.explanation import Explanation
from clearhead.inspection.plot import CELLS, IN_GRID, allowed, numbers, panels, picks, titles
from clearhead.masks._draw import cell_of, shares
from clearhead.models.interception.choice import Heads, Layers
from clearhead.models.recordings.attention_call import AttentionCall
from clearhead.models.recordings.calls import Calls, HeadNumbers, Label, chosen_calls, labels, one_call
from clearhead.models.recordings.tokens import place_of, told_unread, words_read
from clearhead.models.views.beside import Beside
from clearhead.models.views.framed import Framed, framed
from clearhead.models.views.image import Picture
from clearhead.models.views.paged import Paged, place_in
from clearhead.problem.regions import of_sequence
from clearhead.problem.words import ALL_WORDS
from clearhead.report import Layer
from clearhead.report._words import Cells, Shown, list_shown
from clearhead.report.operands import ERROR
from clearhead.report.page import nothing_left
from clearhead.report.statistics import lazy

if TYPE_CHECKING:
    from clearhead.models.recording import Recording


class RecordedCalls(Calls[AttentionCall]):
    """The part of a `Recording` that shows and writes its calls."""

    _listed = "module", "kind", "run", "B × H × Lq × Lk", "mask", "backend"

    def explain(
        self,
        layer: int | str,
        head: int,
        query: int | str,
        key: int | str | None = None,
        *,
        step: int | None = None,
        sequence: int = 0,
        tokens: TokensLike | None = None,
        source_tokens: TokensLike | None = None,
        title: str | None = None,
        digits: int | None = None,
    ) -> Explanation:
        """Explain the weights of one query of one head, step by step: see `AttentionCall.explain`.

        >>> import torch, clearhead as ch
        >>> block, x = ch.nn.DotProductAttention(), torch.eye(4).expand(1, 2, 4, 4)
        >>> with ch.watch(block, values=True) as seen:
        ...     output = block(x, x, x, mask=ch.Causal())
        >>> explanation = seen.explain(layer=0, head=1, query=3, key=2)
        >>> explanation["weights"]
        tensor([[[[0.2151, 0.2151, 0.2151, 0.3547]]]])

        `layer`: its number in the model, negative ones from the last; its name, such as "decoder 0, cross"; or the name
        of its module. `head`, `query`, `key`: numbers, slices, or lists with even steps. Query and key may be words of
        `tokens` that occur once; in cross attention the key is a word of `source_tokens`. With `key=None` the first key
        that the query may see is written out. `step`: of a generation, 0 for the prompt. `sequence`: its number in the
        batch. `tokens`, `source_tokens`: as for `view`. `title`, `digits`: as for `clearhead.explain`.
        """
        call = self.calls[one_call(self.calls, layer, step, "explain")]
        own, source = _texts(call, tokens, source_tokens, sequence)
        if own is not None:
            own = own[: words_read(call, len(own))]
        keys = source if call.kind == "cross" else own
        at: dict[str, Any] = {"head": head, "query": place_of(query, own, call.shape[2], "query")}
        if key is not None:
            at["key"] = place_of(key, keys, call.shape[3], "key")
        chosen = [
            as_index(one, size, f"explain: {name}")
            for (name, one), size in zip(at.items(), call.shape[1:], strict=False)
        ]
        return call.explain((sequence, *chosen), tokens=own, source_tokens=source, title=title, digits=digits)

    def write(self, path: str | Path) -> Path:
        """Write the recording to one file, for `ch.models.load_recording`: to compare checkpoints, or to look later.

        The file is a safetensors file, with JSON in its header: loading it runs no code. It holds queries, keys (in a
        generation each once), masks (each once), biases, sinks and padding; and values, outputs and gradients, if they
        were kept. Gives the path.
        Raises an `UnsupportedError` for calls whose score is no dot product, and a `ClearheadError` where the file
        cannot be written.
        """
        self.check_complete("write")
        require("msgspec", "models", "saving a recording")
        from clearhead.models.recordings.recording_file import write_recording

        return write_recording(self.calls, path)

    def layers(
        self,
        tokens: TokensLike | None = None,
        source_tokens: TokensLike | None = None,
        *,
        sequence: int = 0,
        error: float = ERROR,
    ) -> list[Layer]:
        """Each call with the statistics of its weights, as the report shows them. The arguments are those of `view`."""
        paged = Paged(self.calls, tokens, source_tokens, sequence, error)
        parts = [paged.layer(number) for number in range(len(self.calls))]
        layers = [part for part in parts if isinstance(part, Layer)]
        if parts and not layers:
            raise nothing_left(parts)
        return layers

    def view(
        self,
        layer: Layers = None,
        heads: Heads = None,
        *,
        tokens: TokensLike | None = None,
        source_tokens: TokensLike | None = None,
        sequence: int = 0,
        title: str = "Attention",
        error: float = ERROR,
        beside: Recording | None = None,
        beside_tokens: TokensLike | None = None,
        effects: HeadNumbers | Sequence[HeadNumbers] | None = None,
        image: Array | Picture | None = None,
        opens: tuple[int | str, int] | None = None,
        height: int = 900,
    ) -> Framed:
        """The report, one HTML page: `.write(path)` makes a file of it, which needs no network; a notebook shows it.

        >>> import tempfile, torch, clearhead as ch
        >>> block, x = ch.nn.DotProductAttention(), torch.eye(4).expand(1, 2, 4, 4)
        >>> with ch.watch(block) as seen:
        ...     output = block(x, x, x, mask=ch.Causal())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = seen.view(tokens="the pump was off".split()).write(folder + "/page.html")
        >>> page.name
        'page.html'

        `layer`: the layer's number in the model, negative ones from the last that was recorded; its name, such as
        "decoder 0, cross" or "L1, step 2"; the name of its module, or a pattern of these; a slice, or a list of these;
        None is all of them. `heads`: their numbers, a slice, or a list of these; None is all. `height`: of a notebook's
        frame, in pixels. The last line of a cell shows itself, and `.widget()` is an anywidget.
        `tokens`: a word for each position, or for each word that is not padding (in an encoder-decoder the decoder's,
        and `source_tokens` the encoder's); a list of such lists, one for each sequence; or the ids (B, L) that the
        model was given, which are shown as numbers. None numbers the positions. `sequence`: its number in the batch;
        the page and its measures are of this sequence alone, and one list of words is its words.
        Padding is left out, see `AttentionCall.padding`. A call whose score has `tile()` alone is left out above 1,024
        queries or keys, and the page says so. `error`: about the largest difference between a weight of the page and of
        the call. Queries and keys are rounded as far as it allows, and the page says the measured difference. At 1e-4
        they take half the bytes of float32, which 0 writes.
        `beside`: another recording, of a text or of a checkpoint, whose layers are on the page too, as L0′, L1′, …;
        `beside_tokens`: its words, None where both read the same words. The page compares the heads of both: the
        divergence of a head is that of `compare` over the tokens that are no padding, with `match_tokens` of the words,
        `replaced=True`, where the two texts differ in length; it is not known where masks differ. Both have the same
        `sequence` and the same source text.
        The control "show" of the page chooses the number of a pair: its weight; with `watch(values=True)` the weight
        times the length of the value, and times the length of the value's part of the output; with
        `watch(gradients=True)`, after a backward pass, the weight times its gradient; and the rollout up to a layer,
        where all layers of a run are on the page. `effects`: a `Sweep` over layers and heads, a `LogitAttribution`,
        `Differences`, or a list of these: each is a measure of heads, and the page
        opens on the head with the largest effect of the first, heads coloured by it.
        `image`: of a vision model the picture as it was given to the model, resized and cropped, (height, width, 3) or
        (3, height, width), whole numbers to 255 or floats to 1, or of PIL: its patches are the tokens after the first
        few, and the weights of a patch lie over the picture. Without `tokens` a patch is named by its row and column.
        `opens`: the layer and the head on which the page opens, such as (2, 9) or ("decoder 1, cross", 0). None opens
        it on the head that departs most from uniform attention.
        Raises a `ClearheadError` for words that fit no call, and for a layer or heads that are not there. `.write`
        raises a `ClearheadError` for a path that cannot be written, before it computes, and an `UnsupportedError` where
        no call is left. Layers are made one at a time when the page is written or shown, and an old file is replaced
        when all is written. Cost: a pass over each call's pairs, one more where it is long, and the passes of `table`;
        a notebook holds the page, except as a widget.
        """
        if layer is None:
            self.check_complete("view")
        some = None if layer is None else chosen_calls(self.calls, layer, "view")
        paged = Paged(self.calls, tokens, source_tokens, sequence, error, effects=effects, image=image)
        if beside is None and beside_tokens is not None:
            raise ClearheadError("beside_tokens= are the words of beside=, another recording.")
        shown = paged if beside is None else Beside(paged, paged.alike(beside.calls, beside_tokens))
        return framed(shown, some, heads, title, height, opens)

    def plot(
        self,
        layer: int | str,
        heads: Heads = None,
        *,
        step: int | None = None,
        sequence: int = 0,
        tokens: TokensLike | None = None,
        source_tokens: TokensLike | None = None,
        title: str | None = None,
        cmap: str | Colormap = "GnBu",
        scale: str | float = "linear",
    ) -> Axes | np.ndarray:
        """Draw the heads of a call with matplotlib, in a grid with one scale: see `Weights.plot`.

        `layer`, `step`: as for `explain`. `heads`: a number, a slice, or a list of these; None is all, at most 64.
        `sequence`: its number in the batch; positions of padding are left out.
        `tokens`, `source_tokens`: as for `view`. `title`, `cmap`, `scale`: of the picture.
        Returns the axes, an array of them where there are several. Raises a `ClearheadError` for heads that are not
        there, and for words that do not fit.
        """
        number = one_call(self.calls, layer, step, "plot")
        words = _texts(self.calls[number], tokens, source_tokens, sequence)
        label, style = labels(self.calls)[number], Style(title, cmap, scale)
        return plotted(self.calls[number], label, heads, sequence, words, style)

    @property
    def _labels(self) -> list[Label]:
        return labels(self.calls)


def _texts(
    call: AttentionCall, tokens: Any, source_tokens: Any, sequence: int
) -> tuple[list[str] | None, list[str] | None]:
    """The words of a sequence, as far as the model has read them, and those of its encoder."""
    own: list[str] | None = told_unread([call], word_list("tokens", tokens, sequence), "tokens")
    return own, word_list("source_tokens", source_tokens, sequence)


Words = list[str] | None


def plotted(
    call: AttentionCall, label: Label, heads: Any, sequence: Any, words: tuple[Words, Words], style: Style
) -> Axes | np.ndarray:
    """The picture of `Recording.plot`. `label`: the name of the call."""
    check_style(style)
    place = place_in(call, sequence)
    chosen = picks((place,) if heads is None else (place, heads), call.shape[:2])
    most = CELLS if len(chosen) == 1 else IN_GRID
    rows, columns = list_shown(call, place)
    drawn = panels(call.weights, chosen, most) if rows.all and columns.all else _of_words(call, chosen, rows, columns)
    one = len(drawn) == 1 and heads is not None
    if style.title is None:
        title = f"{label.head(chosen[0][1]) if one else label} ({call.name})"
    else:
        title = f"{style.title}, head {chosen[0][1]}" if one else style.title
    crosses = call.kind == "cross"
    key_tokens = "source_tokens" if crosses else "tokens"
    sides = (
        Side("query", len(rows.places), _labels(words[0], call, rows, columns, "tokens")),
        Side("key", len(columns.places), _labels(words[crosses], call, columns, columns, key_tokens)),
    )
    long = max(side.length for side in sides) > most
    style = replace(style, title=title)
    return draw(drawn, *sides, style, "largest weight in the cell" if long else "weight")


def _of_words(call: AttentionCall, chosen: Sequence[tuple[int, ...]], rows: Shown, columns: Shown) -> list[Panel]:
    """The weights of the heads, without padding on either side."""
    most = CELLS if len(chosen) == 1 else IN_GRID
    sequence, problem = chosen[0][0], call.problem
    with torch.no_grad():
        one = of_sequence(problem, sequence, (call.padding or ALL_WORDS).queries)
        maps = numbers(lazy(one).reduce(Cells(rows, columns, (most, most)))[0])
    cell = cell_of(len(rows.places), len(columns.places), most)

    def hidden(head: int) -> np.ndarray:
        def keep(part: slice) -> torch.Tensor:
            places = rows.places[part]
            first, last = int(places[0]), int(places[-1])
            found = allowed(problem, sequence, head, slice(first, last + 1))
            return found[places - first][:, columns.places]

        found: np.ndarray = shares(keep, len(rows.places), len(columns.places), cell) == 0
        return found

    heads = [pick[1] for pick in chosen]
    return [Panel(maps[h], hidden(h), title) for h, title in zip(heads, titles(chosen), strict=True)]


def _labels(tokens: list[str] | None, call: AttentionCall, side: Shown, keys: Shown, name: str) -> Words:
    """A word for each shown position. Queries that continue a cached text have the last words of the text."""
    if tokens is None:
        return None
    if call.kind == "self":
        tokens = tokens[: words_read(call, len(tokens))]
    count = len(tokens)
    if count in (side.length, len(side.places)):
        return side.labels(tokens)
    if call.kind == "self" and count == keys.length > side.length:
        return side.labels(tokens[-side.length :])
    raise ShapeError(f"{name} has {count} words, and {call.name} has {side.length} positions; pass one word for each.")
