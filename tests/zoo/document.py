"""docs/models.md: the outcome of each architecture."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from zoo.trial import KINDS, NEAR, Outcome

PATH = Path(__file__).parents[2] / "docs" / "models.md"
ROW = re.compile(r"^\| ([\w.-]+) \|.*\| (.+) \|$", re.MULTILINE)


def counts(outcomes: list[str]) -> str:
    """How many there are of each kind, by what the outcomes begin with."""
    kinds = Counter(max((words for words in KINDS.values() if text.startswith(words)), key=len) for text in outcomes)
    return "\n".join(f"- {kinds[words]} {words}" for words in KINDS.values() if kinds[words])


def text_of(outcome: Outcome) -> str:
    """What stands in the last column."""
    text = KINDS[outcome.kind] + (f": {outcome.text}" if outcome.text else "")
    return text.replace("|", "\\|").replace("<", "&lt;").replace("`", "")


def write(outcomes: list[Outcome]) -> None:
    """Write the rows of these outcomes; rows that stand there for others stay."""
    import torch
    import transformers

    backends = {outcome.name: f"{', '.join(outcome.backends)} | {outcome.calls or ''}" for outcome in outcomes}
    rows = {o.name: f"| {o.name} | {backends[o.name]} | {text_of(o)} |" for o in outcomes}
    rows = {**(_rows() if PATH.exists() else {}), **rows}
    texts = [ROW.fullmatch(row)[2] for row in rows.values()]  # type: ignore[index]
    text = TEXT.format(
        transformers=transformers.__version__,
        torch=torch.__version__.split("+")[0],
        number=len(rows),
        counts=counts(texts),
        near=f"{NEAR:.0e}",
        rows="\n".join(rows[name] for name in sorted(rows)),
    )
    PATH.write_text(text, encoding="utf-8")


def _rows() -> dict[str, str]:
    table = PATH.read_text(encoding="utf-8").split("|---|\n")[1]
    return {match[1]: match[0] for match in ROW.finditer(table)}


def read() -> tuple[str, dict[str, str]]:
    """The version of transformers that the document is of, and the outcome of each architecture in it."""
    version = re.search(r"transformers (\S+)", PATH.read_text(encoding="utf-8"))
    assert version is not None
    return version[1], {name: ROW.fullmatch(row)[2] for name, row in _rows().items()}  # type: ignore[index]


TEXT = """# Tested models

Every architecture that transformers {transformers} has a configuration for, {number} of them, tried with `ch.watch` on
torch {torch} by `tests/every_architecture.py`, which writes this page. Of these are:

{counts}

What is done to each: its default configuration is made small (two layers or one of each kind, few words and experts,
widths and heads divided by one number), a model of random weights is built from it, and those that make queries and
keys are scaled until the rows of its attention are far from uniform. It runs on the backend that it takes by itself,
on random inputs, and once more with padding where it takes an attention mask. A model of images and words is given
words alone where that is enough for it: its encoder of images is an architecture of its own here.

- **Recorded and equal**: the outputs have the same bits with and without `ch.watch`; as many calls are recorded as are
  made; and the weights of each, in all rows, heads and sequences, are those of its backend. What these are is found
  without clearhead: the model's own attention function is called again with the identity matrix as values, which gives
  its weights (of more than 256 keys 256 are looked at, and the sum of each row). They may differ by {near}, and by what
  rounding does to scores; the worst difference of a weight is in the table. Where the rows of a call were nearly
  uniform in spite of the scaling, so that a wrong score would hardly be seen, it says so; and where scores were so
  large that rounding hides a difference, the call is not counted.
- **Code of its own**: attention that is computed by neither the attention interface of transformers nor a function of
  PyTorch's is not recorded. The modules in which a softmax was computed are named.
- **No attention call, and no softmax**: convolutions and state spaces, and attention without a softmax of PyTorch's,
  such as Reformer's or I-BERT's.
- **Not built**: the error's first line. Most need inputs that only a processor of their own makes, sizes that fit each
  other in a way that dividing them loses, or a package that is not installed.

`calls` counts those compared. To try some again: `.venv/bin/python tests/every_architecture.py llama whisper`, with
`--write` to put what comes out into this page.

| architecture | backend | calls | outcome |
|---|---|---|---|
{rows}
"""
