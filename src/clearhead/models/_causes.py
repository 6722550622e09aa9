"""An audited call in words: where the mass went, and what may be the cause."""

from __future__ import annotations

from clearhead.models._pairs import Place
from clearhead.models.audited_call import AuditedCall


def described(call: AuditedCall) -> str:
    """Some lines for a person to read."""
    _, _, queries, keys = call.call.problem.sizes.shape
    mask = call.call.mask
    found = mask.title() if mask is not None else "a mask" if call.call.problem.visible is not None else "no mask"
    padding = ", and no padding" if call.call.padding is not None else ""
    lines = [
        f"  {call.name}, {call.kind}, {call.backend}, run {call.run}, {queries} queries and {keys} keys",
        f"  the call had {found}; expected was {call.expected.title()}{padding}",
    ]
    for what, place in (("leaked", call.most_leaked), ("hidden", call.most_hidden)):
        if place is not None:
            mean = float(call.heads[what].nanmean())
            lines += [f"  {what}: {mean:.3g} of the softmax on average, {_told(place, what)}"]
            lines += [f"    may be: {cause}" for cause in _causes(call, place, what)[:1]]
    return "\n".join(lines)


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
        "of torch.nn's modules.": call.disjoint,
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
