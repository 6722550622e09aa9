"""One picture for a slide, with large letters.

    python examples/slides.py date date.svg
    python examples/slides.py date date.png --text "31 de mayo de 2001"
    python examples/slides.py induction induction.svg
    python examples/slides.py mask mask.svg

`date` trains the model of dates.py, and `induction` the model of induction.py, about half a minute each on one core.
The end of the file's name says which format is written: .svg, .pdf, .png.

>>> import matplotlib
>>> matplotlib.use("Agg")
>>> from slides import date, induction, mask
>>> mask().get_title()
'Causal()'
>>> date("20 May 2001", steps=2).get_xlabel()
'the text'
>>> [axes.get_title() for axes in induction(steps=2)]
['layer 0', 'layer 1']
"""

import argparse
from typing import Any

import matplotlib.pyplot as plt
import torch
from dates import FIELDS, ISO, Rewriter, rewritten, train
from dates_data import CHARACTERS, Item, sample, split
from induction import AttentionOnly, periodic
from induction import train as train_induction

import clearhead as ch

LETTERS = {"font.size": 20}  # of all pictures here: titles, words and numbers grow together
TEXT = "Friday, 15th of February 2019"


def mask() -> Any:
    """A causal mask; any mask has such a picture."""
    return ch.Causal().plot(8, 8)


def date(text: str = TEXT, steps: int = 400) -> Any:
    """The alignment of a date: each row is one written character, and where it looked."""
    if unknown := set(text) - set(CHARACTERS):
        raise SystemExit(f"the model reads none of {''.join(sorted(unknown))!r}; it knows {CHARACTERS!r}")
    torch.manual_seed(0)
    model = Rewriter()
    train(model, sample(split()[0], 20_000, seed=0), steps, progress=steps > 10)
    item = Item(text, "-" * len(text), ISO[:1] * len(FIELDS))  # the answer is not known: the model writes it
    written = list(rewritten(model, [item]).iso[0])
    _, axes = plt.subplots(figsize=(max(6.4, 0.5 * len(text)), 7), layout="constrained")
    weights = model.decoder.attend.attention_weights
    weights.plot(0, query_labels=written, key_labels=list(text.replace(" ", "␣")), scale=1.0, ax=axes)
    axes.set(xlabel="the text", ylabel="the answer")
    return axes


def induction(steps: int = 600) -> Any:
    """The two heads of an induction circuit, on a sequence that repeats itself after 16 words."""
    torch.manual_seed(0)
    model = AttentionOnly()
    train_induction(model, steps=steps, progress="induction" if steps > 10 else None)
    tokens, _ = periodic(1, (16, 16))
    with ch.watch(model) as seen, torch.no_grad():
        model(tokens)
    figure, both = plt.subplots(1, 2, figsize=(15, 7), layout="constrained")
    for layer, axes in enumerate(both):
        seen[layer].weights.plot(0, 0, title=f"layer {layer}", scale=1.0, bar=False, ax=axes)
    figure.colorbar(both[0].images[0], ax=both, label="weight")
    return both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("picture", choices=["date", "induction", "mask"])
    parser.add_argument("file", help="the file to write, such as date.svg")
    parser.add_argument("--text", default=TEXT, help="the date that is rewritten (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    plt.rcParams.update(LETTERS)
    drawn = {"date": lambda: date(options.text), "induction": induction, "mask": mask}[options.picture]()
    first = drawn if options.picture != "induction" else drawn[0]
    first.figure.savefig(options.file, dpi=200)
    print(options.file)


if __name__ == "__main__":
    main()
