"""An audited call in words, with the likeliest cause of what differs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clearhead.base.output.text import said

if TYPE_CHECKING:
    from clearhead.models.audits.audit import AuditedCall, WorstRow


def describe_call(call: AuditedCall) -> str:
    """The call and its worst queries, in lines of text."""
    _, _, queries, keys = call.call.problem.sizes.shape
    mask = call.call.mask
    found = "no mask" if call.call.problem.visible is None else "a mask"
    found = found if mask is None else said(mask, mask.title)
    align = call.call.problem.sizes.align
    if call.call.mask is not None and call.call.mask.positional and queries != keys:
        found += f" (align={align!r})"
    padding = ", and no padding" if call.call.padding is not None else ""
    lines = [
        f"  {call.layer}, {call.name}, {call.kind}, {call.backend}, run {call.run}, {queries} queries and {keys} keys",
        f"  the call had {found}; expected was {said(call.expected, call.expected.title)}{padding}",
    ]
    for what, place in (("leaked", call.most_leaked), ("hidden", call.most_hidden)):
        if place is not None:
            mean = float(call.heads[what].nanmean())
            lines += [f"  {what}: {mean:.3g} of the softmax on average, {_describe_row(place, what)}"]
            cause = _find_cause(call, place, what)
            lines += [f"    may be: {cause}"] if cause else []
    return "\n".join(lines)


def _describe_row(place: WorstRow, what: str) -> str:
    first, last = int(place.keys[0]), int(place.keys[-1])
    keys = f"key {first}" if first == last else f"{len(place.keys)} keys of {first} … {last}"
    how = "to" if what == "leaked" else "that should go to"
    most = "" if first == last else f", most to key {place.most} ({place.of_most:.3g})"
    return (
        f"{place.share:.3g} at head {place.head}, query {place.query} of sequence {place.sequence},\n"
        f"    {how} {keys}{most}"
    )


OPPOSITE = (
    "a mask of the opposite meaning. True means 'may attend' to SDPA and transformers, and 'may not' to the masks of "
    "torch.nn's modules."
)
UPPER_LEFT = "a causal mask aligned at the upper left, as is_causal=True of SDPA; or the empty slots of a static cache."
OFF_BY_ONE = "a position counted off by one, such as the length of a key/value cache."
PACKED = (
    "packed documents that the model sees as one text. transformers finds them by position_ids that begin again, where "
    "it is given no attention_mask and no cache: pass use_cache=False."
)
WINDOW = "a sliding window that was lost: see config.sliding_window and config.layer_types."
NOT_CAUSAL = "a causal mask that is missing: see is_causal."
NO_MASK = "no mask reached this call: pass the tokenizer's attention_mask, and see what the backend does with it."
CAUSAL = "a causal mask in a model that should see both sides: see is_causal and config.is_decoder."
MORE = "a mask that hides more than was expected, such as a sliding window, or padding that the audit was not told of."


def _find_cause(call: AuditedCall, place: WorstRow, what: str) -> str | None:
    """The likeliest cause of a difference, or None."""
    problem, expected = call.call.problem, said(call.expected, call.expected.title)
    sizes, keys = problem.sizes, place.keys.tolist()
    later = min(keys) > place.position
    if call.disjoint:
        return OPPOSITE
    if keys in ([place.position], [place.position + 1]) and sizes.keys > 2:
        return OFF_BY_ONE
    empty = what == "hidden" and keys[-1] == sizes.keys - 1
    if sizes.queries < sizes.keys and (sizes.align == "upper_left" or empty):
        return UPPER_LEFT
    if what == "hidden":
        return CAUSAL if later else MORE
    if later and "Causal" in expected:
        return NOT_CAUSAL
    if "Documents" in expected:
        return PACKED
    if "SlidingWindow" in expected:
        return WINDOW
    return NO_MASK if problem.visible is None else None
