"""What calls are called on pages and in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from clearhead.models.attention_call import AttentionCall


def labels(calls: Sequence[AttentionCall]) -> list[str]:
    """The layer "L3" for its one call of layer 3, and "L3.0", "L3.1", … where a layer made several, as in a generation.

    Layers are numbered in the order in which they first call attention. A module that is called again in the same run,
    and continues no keys, is another layer with the same parameters (ALBERT).
    """
    turns: Counter[tuple[int, str]] = Counter()
    layers = []
    for call in calls:
        run = call.run, call.name
        turns[run] += int(not turns[run] or not call.cached_key.number)
        layers.append((call.name, turns[run]))
    numbers = {layer: number for number, layer in enumerate(dict.fromkeys(layers))}
    counts, made = Counter(layers), Counter[tuple[str, int]]()
    found = []
    for layer in layers:
        found.append(f"L{numbers[layer]}" + (f".{made[layer]}" if counts[layer] > 1 else ""))
        made[layer] += 1
    return found
