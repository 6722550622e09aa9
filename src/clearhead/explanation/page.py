"""The page: one HTML file with the steps as data, their numbers in binary, and a program that computes them."""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor

from clearhead.base.output.pages import bundled, embedded, filled, head, source
from clearhead.base.output.text import escaped, printable
from clearhead.base.symbolic.steps import Step
from clearhead.explanation.document import WIDTH, Document, Entry, at_pair, kind_of
from clearhead.explanation.shown import Shown

INPUTS = 12_000  # the most numbers of inputs that a page holds whole, so that it can compute with them
DEEP = 4_000  # the most numbers of a step with one vector per pair; of more, a page holds the vector of one pair
STORED = {"float32": torch.float32, "float64": torch.float64, "int32": torch.int32, "uint8": torch.uint8}


def render(document: Document) -> str:
    """The whole page as a string."""
    script = bundled("explanation.js")
    parts = {
        "head": head(document.title, "This page computes and draws attention", (bundled("explanation.css"),), script),
        "title": escaped(document.title),
        "data": embedded(page_data(document)),
        "program": script,
    }
    return filled(source(__package__, "page.html"), parts)


def page_data(document: Document) -> dict[str, Any]:
    """The data of the page, for JSON.

    A page that holds every number of the inputs can compute with changed inputs. Of a long call it holds the entries
    that are shown, and their labels.
    """
    shown, steps = document.shown, [step for part in document.parts for step in part.steps]
    inputs = sum(step.value.numel() for step in steps if step.given)
    paired = any("Lk" in step.axes for step in steps)  # else it has positions, and no keys
    held = len(shown.keys) if paired else shown.sizes.keys
    whole = held == shown.sizes.keys and inputs <= INPUTS
    kept = {"B": shown.batches, "H": shown.heads, "Lq": shown.queries, "Lk": shown.keys, "L": shown.queries}
    return {
        "title": printable(document.title),
        "digits": document.digits,
        "leftOut": list(shown.left_out),
        "whole": whole,
        "keys": [held, shown.sizes.keys],
        "single": [n == 1 for n in shown.sizes.shape[:2]],
        "labels": {axis: [shown.name(axis, place) for place in places] for axis, places in kept.items()},
        "places": {axis: list(places) for axis, places in kept.items()},
        "pair": [*shown.pair[:3], shown.keys.index(shown.pair[3]) if paired else 0],
        "parts": [
            {
                "title": part.title,
                "drawn": part.drawn,
                "steps": [_step(entry, whole) for entry in part.entries],
            }
            for part in document.sections
        ],
    }


def _step(entry: Entry, whole: bool) -> dict[str, Any]:
    step, (value, of) = entry.step, _held(entry.step, entry.shown, whole)
    return entry.facts | {
        "tree": step.tree,
        "copies": list(step.copies),
        "within": step.within,
        "kind": kind_of(step.value),
        "axes": list(step.axes),
        "more": [a - b for a, b in zip(step.value.shape, value.shape, strict=True)],
        "of": of,
        **_stored(value),
    }


def _held(step: Step, shown: Shown, whole: bool) -> tuple[Tensor, list[int] | None]:
    """The part of a step that the page holds; and the pair of its only vector, as an index into these entries."""
    value = step.value.detach().cpu()
    if not whole:
        for n, (axis, size) in enumerate(zip(step.axes, value.shape, strict=True)):
            if axis == "Lk" and size == shown.sizes.keys:
                value = value.index_select(n, torch.tensor(shown.keys, device=value.device))
            elif size > WIDTH and axis not in ("B", "H", "Lq"):
                value = value.narrow(n, 0, WIDTH)
    of = None
    if not step.given and value.ndim > 4 and value.numel() > DEEP:
        b, h, i, j = at_pair(step, shown)[:4]
        of = [b, h, i, shown.keys.index(j) if step.value.shape[3] > 1 else 0]
        value = value[tuple(slice(n, n + 1) for n in of)]
    return value, of


def _stored(value: Tensor) -> dict[str, Any]:
    """An array as base64 of its values in C order, their type and its sizes."""
    if value.dtype == torch.bool:
        name = "uint8"
    elif value.is_floating_point():
        name = "float64" if value.dtype == torch.float64 else "float32"
    else:
        name = "int32" if not value.numel() or int(value.abs().max()) < 2**31 else "float64"
    array = value.to(STORED[name]).numpy()
    content = array.astype(array.dtype.newbyteorder("<")).tobytes()
    return {"sizes": list(value.shape), "type": name, "values": base64.b64encode(content).decode("ascii")}
