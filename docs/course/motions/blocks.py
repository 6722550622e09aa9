"""Chapter 10: the softmax of one query, block after block of its keys."""

import itertools
import math

from torch import Tensor

import clearhead as ch
from clearhead.explanation.motion import Motion, Picture


def online_softmax(query: Tensor, key: Tensor, value: Tensor, block: int = 4) -> Motion:
    """The largest score m, the sum ℓ and the output of the keys so far, after each block of keys.

    query (1, E), key (Lk, E), value (Lk, Ev).
    """
    scores = ch.explain(query, key, value)["scores"].flatten().tolist()
    final = ch.attention(query, key, value)[0].tolist()
    count, wide, many = len(scores), 336 / len(scores), math.ceil(len(scores) / block)
    starts = [(n * block, min((n + 1) * block, count)) for n in range(many)]
    parts = [ch.partial(query, key[a:b], value[a:b], keys=(a, count)) for a, b in starts]
    walked = [*itertools.accumulate(parts, lambda so_far, new: so_far.merge(new))]
    outputs = [part.finish()[0].tolist() for part in walked]
    reach = max(abs(x) for output in outputs for x in output)
    before, frames = -math.inf, []
    for n, ((start, stop), part, output) in enumerate(zip(starts, walked, outputs, strict=True)):
        m = max(scores[:stop])
        total = math.exp(part.logsumexp.item() - m)
        picture = Picture(250)
        picture.text("what", 12, 16, "e to the power of (score − m), for the keys so far", look="faint", anchor="start")
        for j, score in enumerate(scores):
            high = 90 * math.exp(score - m) if j < stop else 0.0
            x = 12 + j * wide
            picture.rect(f"key {j}", x + 1, 120 - high, wide - 2, high, look="bar" if start <= j < stop else "square")
        for b in range(many):
            x, end = 12 + b * block * wide, 12 + min((b + 1) * block, count) * wide
            look = "bar" if b == n else "square" if b < n else "ground"
            picture.rect(f"block {b}", x + 1, 124, end - x - 2, 8, look=look)
        picture.text("largest", 12, 154, f"m = {m:.2f}".replace("-", "−"), look="strong", anchor="start")
        picture.text("sum", 110, 154, f"ℓ = {total:.2f}", look="strong", anchor="start")
        factor = math.exp(before - m)
        scaled = n > 0 and m > before
        picture.text("scaled", 348, 154, f"sums so far × {factor:.2f}" if scaled else "", anchor="end")
        for e, (now, end) in enumerate(zip(output, final, strict=True)):
            y, middle, unit = 170 + 26 * e, 228, 116 / reach
            picture.text(f"output {e}", 12, y + 13, f"output, entry {e}", look="faint", anchor="start")
            picture.rect(f"so far {e}", middle + min(0.0, now * unit), y, abs(now * unit), 18, look="square")
            picture.line(f"final {e}", middle + end * unit, y - 3, middle + end * unit, y + 21, look="mark")
        picture.line("zero", 228, 164, 228, 170 + 26 * len(final))
        legend = "The thick lines are the output over all keys."
        picture.text("legend", 12, 240, legend, look="faint small", anchor="start")
        words = f"The largest score is {m:.2f}." if n == 0 else "The largest score stays, and so do the sums so far."
        if scaled:
            words = f"The largest score rises to {m:.2f}, so the sums so far are multiplied by {factor:.2f}."
        if stop == count:
            words += " The output is now that of all keys."
        words = f"Block {n + 1} of {many}: keys {start} to {stop - 1}. {words}"
        frames.append((words.replace("-", "−"), picture))
        before = m
    return Motion("The online softmax, block by block", frames, pause=2.0)
