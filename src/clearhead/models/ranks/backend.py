"""The attention of a model that shares its sequences out over ranks, as transformers calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clearhead.base.errors import UnsupportedError
from clearhead.base.positions import FAR
from clearhead.distributed import Layout, attention
from clearhead.masks.base import Mask
from clearhead.masks.causal import Causal
from clearhead.masks.sliding_window import SlidingWindow
from clearhead.models.tap.keywords import RANKS, READ, check_keywords, dot

SHARED = frozenset({"scaling", "softcap", "s_aux", "dropout", "is_causal", "sliding_window", "position_ids"})


@dataclass
class Running:
    """A call of a model that is under way, with the masks of the whole sequence."""

    model: nn.Module
    layout: Layout
    padding: Mask | None
    documents: Mask | None  # used only with causal masks, where transformers looks for packed documents
    attended: bool = False  # whether some layer has called `attend`


class Shared(NamedTuple):
    """The layout and the mask that each layer's attention needs beside its operands."""

    layout: Layout
    mask: Mask | None


running: ContextVar[Running | None] = ContextVar("running", default=None)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    device: Any = "cpu",
    **kwargs: Any,
) -> Tensor:
    """The function of the mask interface: a tensor without numbers of its own, with the whole mask as an attribute.

    Layers are given this tensor itself, also where a checkpoint computes them again, so nothing else is remembered.
    """
    call = running.get()
    if call is None:
        raise UnsupportedError(
            "a layer's mask was asked for outside of a call of the model that run_on_clearhead(…, layout=…) "
            "was given, or of a model inside it: call one of these."
        )
    held = call.layout.count()
    if (q_length, kv_length, int(q_offset), int(kv_offset)) != (held, held, 0, 0):
        raise UnsupportedError(
            f"{type(call.model).__name__} has attention of {q_length} queries and {kv_length} keys, and this rank "
            f"holds {held} positions of {call.layout}: attention inside one sequence is shared out over ranks; cross "
            "attention, prefixes, and a cache's keys are not."
        )
    masks = list(rules(mask_function))
    if call.documents is not None and any(isinstance(mask, Causal) for mask in masks):
        masks.append(call.documents)
    if call.padding is not None:
        masks.append(call.padding)
    mask = None
    for each in masks:
        mask = each if mask is None else mask & each
    carrier: Any = torch.ones((), dtype=torch.bool, device=device).expand(batch_size, 1, held, held)
    carrier.clearhead_ranks = Shared(call.layout, mask)
    return carrier  # type: ignore[no-any-return]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function of the attention interface: gives (B, l, H, Ev) of this rank's l positions, and no weights."""
    name = type(module).__name__
    shared: Shared | None = getattr(attention_mask, "clearhead_ranks", None)
    if shared is None:
        raise UnsupportedError(
            f"{name} makes its mask in its own code, {_shown(attention_mask)}, of this rank's positions alone: a "
            "sequence can be shared out over ranks in models that ask transformers for their masks."
        )
    if call := running.get():
        call.attended = True
    check_keywords(name, RANKS, kwargs)
    if more := sorted(word for word, given in kwargs.items() if given is not None and word in READ - SHARED):
        raise UnsupportedError(
            f"{name} gives its attention {', '.join(more)}, of this rank's positions alone: position biases, chosen "
            "keys and packed lengths are not shared out over ranks. Packed documents are marked by position_ids."
        )
    out = attention(
        query,
        key,
        value,
        layout=shared.layout,
        score=dot(scaling, kwargs.get("softcap")),
        mask=shared.mask,
        sinks=kwargs.get("s_aux"),
        dropout_p=dropout,
    )
    return out.transpose(1, 2).contiguous(), None


def _shown(mask: Tensor | None) -> str:
    return "None" if mask is None else f"{mask.dtype}, shape {tuple(mask.shape)}"


HOME = "transformers.masking_utils."


def rules(function: Callable[..., Any]) -> Iterator[Mask]:
    """The masks whose intersection a `mask_function` of transformers is; none, where every pair is allowed.

    These functions take positions, and would be given positions within this rank's part. So they are not called, but
    recognised by their names and by the variables that they close over.
    """
    full = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"
    name = full.removeprefix(HOME) if full.startswith(HOME) else ""
    code = getattr(function, "__code__", None)
    names = code.co_freevars if code is not None else ()
    held = dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
    if name == "causal_mask_function":
        yield Causal()
    elif name == "and_masks.<locals>.and_mask":
        for part in held["mask_functions"]:
            yield from rules(part)
    elif name == "sliding_window_overlay.<locals>.inner_mask":
        yield SlidingWindow(before=held["sliding_window"] - 1, after=FAR)
    elif name == "sliding_window_bidirectional_overlay.<locals>.inner_mask":
        yield SlidingWindow(before=held["sliding_window"], after=held["sliding_window"])
    elif name != "bidirectional_mask_function":
        shown = (name or full).split(".<locals>")[0]
        raise UnsupportedError(
            f"the model's mask has the rule {shown!r}, which is not known for a sequence that is shared out over "
            "ranks: causal, bidirectional and sliding-window masks are, with padding and packed documents."
        )
