"""An audited call in words: where the mass went, and what may be the cause."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.models._pairs import weights_of
from clearhead.models.audited_call import AuditedCall
from clearhead.problem.visible import Visible


class Place(NamedTuple):
    """The query of a call where a share is largest."""

    sequence: int
    head: int
    query: int
    position: int  # of the query among the keys
    share: float
    keys: Tensor  # to which it goes, or from which it was kept, ascending
    most: int  # the key that has most of it
    of_most: float  # and how much


def described(call: AuditedCall) -> str:
    """Some lines for a person to read."""
    _, _, queries, keys = call.call.problem.sizes.shape
    mask = call.call.mask
    found = mask.title() if mask is not None else "a mask" if call.call.problem.visible is not None else "no mask"
    lines = [
        f"  {call.name}, {call.kind}, {call.backend}, run {call.run}, {queries} queries and {keys} keys",
        f"  the call had {found}; expected was {call.expected.title()}",
    ]
    parts = {"leaked": (call.leaked, call.pairs.extra), "hidden": (call.hidden, call.pairs.missing)}
    for what, (share, part) in parts.items():
        if part is not None:
            place, mean = _worst(call, share, part), float(call.heads[what].nanmean())
            lines += [f"  {what}: {mean:.3g} of the softmax on average, {_told(place, what)}"]
            lines += [f"    may be: {cause}" for cause in _causes(call, place, what)[:1]]
    return "\n".join(lines)


def _worst(call: AuditedCall, share: Tensor, part: Visible) -> Place:
    counted = share.masked_fill(~call.queries, -1.0)
    number = int(counted.flatten().argmax())
    sequence, head, query = (int(i) for i in torch.unravel_index(torch.tensor(number, device="cpu"), counted.shape))
    sizes = call.call.problem.sizes
    at = slice(sequence, sequence + 1), slice(head, head + 1), slice(query, query + 1)
    keep = part.spans.keep(*at, slice(None), sizes.keys).expand(1, 1, 1, sizes.keys)[0, 0, 0]
    with torch.no_grad():
        row = weights_of(call.call, part)[sequence, head, query]
    most = int(row.argmax())
    value = float(share[sequence, head, query])
    position = query + sizes.keys - sizes.queries
    return Place(sequence, head, query, position, value, keep.nonzero()[:, 0], most, value * float(row[most]))


def _told(place: Place, what: str) -> str:
    first, last = int(place.keys[0]), int(place.keys[-1])
    keys = f"key {first}" if first == last else f"{len(place.keys)} keys of {first} … {last}"
    how = "to" if what == "leaked" else "that should go to"
    most = "" if first == last else f", most to key {place.most} ({place.of_most:.3g})"
    return (
        f"{place.share:.3g} at head {place.head}, query {place.query} of sequence {place.sequence},\n"
        f"    {how} {keys}{most}"
    )


def _causes(call: AuditedCall, place: Place, what: str) -> list[str]:
    """What may have led to this, the likeliest first."""
    sizes, expected = call.call.problem.sizes, call.expected.title()
    later, only = bool((place.keys > place.position).all()), place.keys.tolist()
    signs = {
        "a mask of the opposite meaning. True means 'may attend' to SDPA and transformers, and 'may not' to the masks "
        "of torch.nn's modules.": call.pairs.both is None,
        "causal masks aligned at the upper left, where the last query should stand at the last key: is_causal=True of "
        "SDPA puts query 0 at key 0.": sizes.queries < sizes.keys and sizes.align == "upper_left",
        "a position counted off by one, such as the length of a key/value cache.": only
        in ([place.position], [place.position + 1])
        and sizes.keys > 2,
    }
    if what == "leaked":
        signs |= {
            "packed documents that the model sees as one text. transformers finds them by position_ids that begin "
            "again, only where there is no attention_mask and no cache: pass use_cache=False and no attention_mask."
            " A document that continues at the position where the one before it ended is not found.": "Documents"
            in expected
            and not later,
            "a sliding window that was lost: see config.sliding_window and config.layer_types.": "SlidingWindow"
            in expected
            and not later,
            "no mask reached this call: pass the tokenizer's attention_mask, and see what the backend does with it."
            if call.kind == "cross" or not later or "Causal" not in expected
            else "a causal mask that is missing: see is_causal.": call.call.problem.visible is None,
            "later positions are seen: see is_causal.": later,
        }
    else:
        signs |= {
            "a causal mask in a model that should see both sides: see is_causal and config.is_decoder.": later,
            "a mask that hides more than was expected, such as a sliding window or padding.": True,
        }
    return [words for words, true in signs.items() if true]
