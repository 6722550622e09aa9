"""Chapters 5 and 6: heads that are split and joined, and the hands of rotary positions."""

import torch
from torch import Tensor

import clearhead as ch
from clearhead.explanation.motion import Motion, Picture, short


def split_heads(flat: Tensor, joined: Tensor, heads: int) -> Motion:
    """The numbers of a projection, cut into heads, put head by head, and joined again after the heads' attention.

    flat (B, L, H · D): what a projection gave. joined (B, L, H · D): the heads' outputs, side by side. Sequence 0.
    """
    batch, length, width = flat.shape
    each = width // heads
    shapes = {"joined": f"(B, L, H·D) = ({batch}, {length}, {width})"}
    shapes["cut"] = f"(B, L, H, D) = ({batch}, {length}, {heads}, {each})"
    shapes["apart"] = f"(B, H, L, D) = ({batch}, {heads}, {length}, {each})"
    numbers = {"before": flat[0].detach(), "after": joined[0].detach()}
    side = 320 / (width + 0.8 * (heads - 1))  # of a number's square, with room between the heads where they are cut
    across = (heads + 1) // 2  # heads in a line where they stand apart

    def place(state: str, position: int, entry: int) -> tuple[float, float, float, float]:
        """Left, top, width and height of a number."""
        head, n = divmod(entry, each)
        if state == "apart":
            x, y, size = 34 + (head % across) * 320 / across, 52 + (head // across) * 86, 1.5 * side
            return x + n * size, y + position * size, size - 1, size - 1
        room = head if state == "cut" else (heads - 1) / 2
        return 32 + (entry + 0.8 * room) * side, 62 + position * 30, side - 1, 25

    def drawn(state: str, which: str) -> Picture:
        picture, values = Picture(218), numbers[which]
        picture.text("shape", 180, 18, shapes[state], look="strong")
        faded = 0.0 if state == "apart" else 1.0
        for position in range(length):
            y = 79 + 30 * position
            picture.text(f"position {position}", 22, y, f"{position}", look="faint", anchor="end", opacity=faded)
            for entry in range(width):
                share = 0.3 + 0.7 * abs(values[position, entry].item()) / values.abs().max().item()
                hue = f"hsl({round(210 + 360 * (entry // each) / heads)} 60% 48%)"
                box = place(state, position, entry)
                picture.rect(f"number {position} {entry}", *box, look="plain", fill=hue, opacity=share)
        for head in range(heads):
            x, y, _, _ = place(state, 0, head * each)
            name = f"{head}" if state == "joined" else f"head {head}"
            picture.text(f"head {head}", x, y - 6, name, look="small", anchor="start")
        return picture

    states = [
        ("joined", "before", f"A projection gave {width} numbers for each of {length} positions, here the rows."),
        (
            "cut",
            "before",
            f"reshape(B, L, H, D): each row is cut into {heads} pieces of {each}. No number moves in memory.",
        ),
        ("apart", "before", f"transpose(1, 2): heads before positions. Each head has its matrix, {length} × {each}."),
        ("apart", "after", "Attention in each head alone gives other numbers, in the same shape."),
        ("cut", "after", "transpose(1, 2) again: positions before heads."),
        ("joined", "after", f"reshape(B, L, H·D): {width} numbers for each position, for the last projection."),
    ]
    frames = [(words, drawn(state, which)) for state, which, words in states]
    return Motion("Heads are split, attend, and are joined", frames, pause=2.2, still=2)


def rotary(q: Tensor, k: Tensor, apart: int = 2, base: float = 100.0) -> Motion:
    """Pairs of entries of a query and a key as hands of clocks: both move on place by place, then the query alone.

    q, k (E,): the vectors before they are turned; entry i makes a pair with entry i + E/2. `base`: of the angles.
    """
    places = 16
    turn = ch.nn.RotaryEmbedding(len(q), base=base)
    queries, keys = turn(q.expand(places, -1)), turn(k.expand(places, -1))
    speed = base ** (-torch.arange(len(q) // 2) / (len(q) // 2))  # radians for a place, of each pair
    longest = torch.cat([x.view(2, -1).norm(dim=0) for x in (q, k)]).max().item()
    wide = 360 / len(speed)
    radius = min(40.0, wide / 2 - 6)

    def hand(picture: Picture, name: str, n: int, x: Tensor, place: int, look: str) -> None:
        a, b = x.view(2, -1)[:, n].tolist()
        size = radius * (a * a + b * b) ** 0.5 / longest
        middle, angle = (n + 0.5) * wide, torch.atan2(torch.tensor(b), torch.tensor(a)) + place * speed[n]
        turned = f"rotate({short(-torch.rad2deg(angle).item())} {short(middle)} 66)"
        picture.line(f"{name} {n}", middle, 66, middle + size, 66, look=look, transform=turned)
        end = "bar" if name == "query" else "accent"
        picture.add(f"{name} end {n}", "circle", end, cx=middle + size, cy=66, r=4, transform=turned)

    moves = [(p + apart, p) for p in range(7)] + [(p, 6) for p in range(7 + apart, 12 + apart)]
    largest = max(abs((queries[i] @ keys[j]).item()) for i, j in moves)
    frames = []
    for i, j in moves:
        picture, score = Picture(182), (queries[i] @ keys[j]).item()
        picture.line("query look", 12, 126, 32, 126, look="first")
        picture.text("query name", 38, 130, f"query at place {i}", anchor="start")
        picture.line("key look", 192, 126, 212, 126, look="second")
        picture.text("key name", 218, 130, f"key at place {j}", anchor="start")
        for n in range(len(speed)):
            middle = (n + 0.5) * wide
            picture.add(f"clock {n}", "circle", "ground", cx=middle, cy=66, r=radius + 4)
            picture.text(f"speed {n}", middle, 14, f"{torch.rad2deg(speed[n]):.0f}° a place", look="faint small")
            hand(picture, "query", n, q, i, "first")
            hand(picture, "key", n, k, j, "second")
        picture.text("score", 12, 160, f"q · k = {score:.3f}".replace("-", "−"), look="strong", anchor="start")
        picture.line("zero", 240, 144, 240, 172)
        size = 100 * score / largest
        picture.rect("size", 240 + min(0.0, size), 150, abs(size), 16, look="bar")
        words = f"Query at place {i}, key at place {j}, {i - j} apart: the dot product is {score:.3f}."
        same = "Both hands of a clock turn alike, so the angle between them stays."
        other = "The query alone turns on: the angles change, and so does the product."
        frames.append((f"{words} {same if i - j == apart else other}".replace("-", "−"), picture))
    return Motion("One clock for each pair of entries", frames, pause=0.9, still=6)
