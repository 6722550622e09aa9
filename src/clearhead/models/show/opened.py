"""The head on which a page opens, where a person names it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clearhead.base.errors import ClearheadError
from clearhead.base.selected import is_number, items_of, numbers_of
from clearhead.base.text import brief, listed
from clearhead.models.attention_call import AttentionCall
from clearhead.models.calls import chosen_calls, labels


def opened(
    calls: Sequence[AttentionCall],
    shown: Sequence[int],
    heads: Sequence[Sequence[int] | None],
    layer: Any,
    head: Any,
    names: tuple[str, str],
) -> tuple[str, int]:
    """The label of the layer and the number of the head, each the page's first one where it is None.

    `shown`: the numbers of the calls on the page. `heads`: of each of these the heads on the page, None for all.
    `names`: what the layer and the head are called in errors.
    """
    said = [str(label) for label in labels(calls)]
    meant = [shown[0]] if layer is None else chosen_calls(calls, layer, names[0])
    found = [number for number in shown if number in meant]
    if len(found) != 1:
        which = f"is on {len(found)} layers of the page" if found else "is not on the page"
        some = listed(said[number] for number in found or shown)
        raise ClearheadError(
            f"{names[0]}: {brief(layer)} {which}; pass one layer that is on the page, such as one of {some}."
        )
    number = found[0]
    call, own = calls[number], heads[shown.index(number)]
    count = call.shape[1]
    if head is None:
        return said[number], 0 if own is None else own[0]
    items = items_of(head)
    if len(items) != 1 or not is_number(items[0]):
        raise ClearheadError(f"{names[1]} is {brief(head)}; expected the number of one head, 0 to {count - 1}.")
    (wanted,) = numbers_of(items[0], count, names[1], f"{call.name} has {count} heads")
    if own is not None and wanted not in own:
        raise ClearheadError(
            f"{names[1]} is {wanted}, and the page shows of {call.name} the heads {', '.join(map(str, own))} alone; "
            "pass one of these."
        )
    return said[number], wanted


def opened_by(
    calls: Sequence[AttentionCall], shown: Sequence[int], heads: Sequence[Sequence[int] | None], opens: Any
) -> tuple[str, int] | None:
    """The same of the argument `opens` of `Recording.view`, a layer and a head; None where it is None."""
    if opens is None:
        return None
    if not isinstance(opens, tuple | list) or len(opens) != 2:
        raise ClearheadError(f"opens is {brief(opens)}; pass a layer and a head, such as opens=(0, 1).")
    layer, head = opens
    return opened(calls, shown, heads, layer, head, ("opens: the layer", "opens: the head"))
