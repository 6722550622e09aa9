"""Chapter 7: two heads during the training of the chapter's model, from maps of weights that were stored.

`PYTHONPATH=examples python docs/course/motions/checkpoints.py` trains the model as the chapter does, and writes
`induction_steps.json` beside the chapters: at some steps the two losses, the two scores, and the weights of both heads
on one sequence, in hundredths.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.explanation.motion import Motion, Picture

FILE = Path(__file__).parents[1] / "induction_steps.json"
STEPS = (0, 20, 80, 100, 110, 120, 130, 140, 160, 200, 300, 600)
PERIOD, SHOWN = 8, 24  # of the sequence whose weights are stored


def sequence() -> Tensor:
    """The tokens of the maps, (1, 24): 8 words, three times."""
    return torch.arange(3, 3 + PERIOD).repeat(SHOWN // PERIOD)[None]


def maps(model: nn.Module) -> list[list[list[int]]]:
    """For each layer the weights of its head that a query may have, row by row, in hundredths."""
    with torch.no_grad(), ch.watch(model) as seen:
        model(sequence())
    weights = [seen[layer].weights[0, 0].dense() for layer in range(len(seen.names))]
    return [[(100 * layer[i, : i + 1]).round().int().tolist() for i in range(SHOWN)] for layer in weights]


def trained(steps: tuple[int, ...] = STEPS) -> list[dict[str, Any]]:
    """The measures and the maps at these steps of the chapter's training; the last one ends it."""
    from induction import AttentionOnly, train

    torch.manual_seed(0)
    model, found = AttentionOnly(), dict[int, list[list[list[int]]]]()
    done = iter(range(steps[-1] + 1))

    def look(module: nn.Module, given: Any) -> None:
        if torch.is_grad_enabled() and (step := next(done)) in steps:
            found[step] = maps(model)

    with model.register_forward_pre_hook(look):
        history = train(model, steps=steps[-1], every=math.gcd(*steps))
    return [
        {
            "step": at.step,
            "new": round(at.new, 3),
            "again": round(at.again, 3),
            "previous": round(at.previous[0, 0].item(), 3),
            "induction": round(at.induction[1, 0].item(), 3),
            "maps": found[at.step],
        }
        for at in history
        if at.step in steps
    ]


def induction() -> Motion:
    """The two heads of the chapter's model at some steps of its training, and the measures up to there."""
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    side, frames = 160 / SHOWN, []
    seen = [
        [[max(at["maps"][layer][i][j] for at in stored) for j in range(i + 1)] for i in range(SHOWN)]
        for layer in (0, 1)
    ]
    curves = {"previous": ("first", "previous token, layer 0"), "induction": ("second", "induction score, layer 1")}

    def right(step: int) -> float:
        return 12 + 336 * (step / stored[-1]["step"]) ** 0.5

    for n, at in enumerate(stored):
        picture = Picture(318)
        for layer, rows in enumerate(at["maps"]):
            left = 12 + layer * 176
            name = ("layer 0: the previous token", "layer 1: what followed")[layer]
            picture.text(f"layer {layer}", left, 16, name, anchor="start")
            picture.rect(f"ground {layer}", left, 24, 160, 160, look="ground")
            for i, row in enumerate(rows):
                for j, hundredths in enumerate(row):
                    if seen[layer][i][j] > 8:  # else it is as good as unseen in every frame
                        name, share = f"{layer} {i} {j}", min(1.0, hundredths / 60)
                        picture.rect(name, left + j * side, 24 + i * side, side, side, look="bar", opacity=share)
        picture.line("axis", 12, 284, 348, 284)
        picture.line("one", 12, 214, 348, 214, opacity=0.3)
        picture.text("one name", 16, 225, "1", look="faint small", anchor="start")
        for m, (key, (look, name)) in enumerate(curves.items()):
            points = [(right(s["step"]), 284 - 70 * s[key]) for s in stored]
            picture.path(f"whole {key}", points, look=look, opacity=0.25)
            picture.path(f"so far {key}", points[: n + 1] + points[n : n + 1] * (len(points) - n - 1), look=look)
            picture.line(f"look {key}", 12 + 176 * m, 302, 28 + 176 * m, 302, look=look)
            picture.text(f"name {key}", 34 + 176 * m, 306, name, look="small", anchor="start")
        picture.line("now", right(at["step"]), 206, right(at["step"]), 284)
        picture.text("step", 12, 202, f"step {at['step']}", look="strong", anchor="start")
        picture.text("loss", 348, 202, f"loss on words that come again: {at['again']:.2f}", anchor="end")
        words = (
            f"Step {at['step']}: weight on the previous token {at['previous']:.2f} in layer 0, induction score "
            f"{at['induction']:.2f} in layer 1, loss on words that come again {at['again']:.2f}."
        )
        frames.append((words, picture))
    return Motion("Induction forms, on 8 words three times", frames, pause=0.9)


if __name__ == "__main__":
    torch.set_num_threads(1)
    FILE.write_text(json.dumps(trained(), separators=(",", ":")) + "\n", encoding="utf-8")
