"""What a watched model did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from clearhead._errors import ClearheadError, ShapeError, UnsupportedError
from clearhead.models.call import Call
from clearhead.report import Layer, render
from clearhead.report.from_call import layer_from_call

Progress = Callable[[Iterable[Call]], Iterable[Call]]


class Seen:
    """What a watched model did: its attention calls.

    `calls`, in order; `seen[name]`, the calls of one module, in order; iterating gives the modules' names.
    """

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls

    def __getitem__(self, name: str) -> list[Call]:
        found = [call for call in self.calls if call.name == name]
        if not found:
            names = list(self)
            listed = ", ".join(map(repr, names[:6])) + (", …" if len(names) > 6 else "")
            raise ClearheadError(f"no attention call of a module {name!r} was seen; there are {listed or 'none'}.")
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(call.name for call in self.calls))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        kinds = [call.kind for call in self.calls]
        return f"Seen({len(self.calls)} calls, {kinds.count('self')} self and {kinds.count('cross')} cross)"

    def layers(
        self,
        tokens: Sequence[str] | None = None,
        source_tokens: Sequence[str] | None = None,
        *,
        sequence: int = 0,
        progress: Progress | None = None,
    ) -> list[Layer]:
        """Each call with the statistics of its weights, as the report shows it. Arguments as for `report`."""
        if tokens is not None:
            sizes = {n for call in self.calls for n in call.weights.shape[-2:]}
            given = {"tokens": tokens, "source_tokens": source_tokens}
            for name, words in given.items():
                if words is not None and (isinstance(words, str) or not all(isinstance(w, str) for w in words)):
                    raise ClearheadError(
                        f"{name} takes a list of words, one for each position; got a {type(words).__name__}. "
                        "For token ids pass tokenizer.convert_ids_to_tokens(ids)."
                    )
                if words is not None and len(words) not in sizes:
                    raise ShapeError(
                        f"{name} has {len(words)} words, and the calls have {sorted(sizes)} queries or keys; pass one "
                        "word for each position of the sequence that the model was given."
                    )
        layers = []
        for call in self.calls if progress is None else progress(self.calls):
            batch = call.query.shape[0] if call.query.ndim == 4 else 1
            if not -batch <= sequence < batch:
                raise ClearheadError(f"sequence is {sequence}, and {call.name} was given a batch of {batch}.")
            lowered = call.weights.problem.lowered
            if lowered is None or lowered.phi != "mul":
                raise UnsupportedError(
                    f"{call.name} scores by {type(call.score).__name__}, and the page computes dot products alone. "
                    "Look at call.weights."
                )
            queries, keys = call.weights.shape[-2:]
            own, other = tokens or (), source_tokens or tokens or ()
            if call.kind == "self" and len(own) != keys:
                own = other  # an encoder's
            source = other if call.kind == "cross" else own
            layers.append(layer_from_call(call, own[-queries:], source, sequence % batch))
        return layers

    def report(
        self,
        path: str | Path,
        tokens: Sequence[str] | None = None,
        source_tokens: Sequence[str] | None = None,
        *,
        sequence: int = 0,
        title: str = "Attention",
    ) -> Path:
        """Write the report: one HTML page that opens from disk and needs no network.

        `tokens`: a word for each position, (of the decoder, where there is one; `source_tokens` are the encoder's);
        None numbers the positions. `sequence`: which one of the batch. Returns the path.
        Raises a `ClearheadError` for words that fit no call, and for a path that cannot be written.
        """
        return write_page(path, render(self.layers(tokens, source_tokens, sequence=sequence), title))


def write_page(path: Any, page: str) -> Path:
    """Write a page, or say why it cannot be written."""
    target = Path(path)
    try:
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ClearheadError(
            f"cannot write the report to {str(path)!r}: {error.strerror}. Pass a file in a folder that exists and that "
            "you may write to."
        ) from error
    return target
