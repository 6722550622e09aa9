"""docs/models.md: the outcome of each architecture."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from zoo.trial import KINDS, Outcome

PATH = Path(__file__).parents[2] / "docs" / "models.md"


def counts(outcomes: list[Outcome]) -> str:
    """How many there are of each kind."""
    found = Counter(outcome.kind for outcome in outcomes)
    return "\n".join(f"- {found[kind]}: {words}" for kind, words in KINDS.items() if found[kind])


def write(outcomes: list[Outcome]) -> None:
    import torch
    import transformers

    rows = "\n".join(row(outcome) for outcome in outcomes)
    PATH.write_text(
        TEXT.format(
            transformers=transformers.__version__,
            torch=torch.__version__.split("+")[0],
            number=len(outcomes),
            counts=counts(outcomes),
            rows=rows,
        ),
        encoding="utf-8",
    )


def row(outcome: Outcome) -> str:
    text = KINDS[outcome.kind] + (f": {outcome.text}" if outcome.text else "")
    text = text.replace("|", "\\|").replace("<", "&lt;")
    return f"| {outcome.name} | {', '.join(outcome.backends)} | {outcome.calls or ''} | {text} |"


def read() -> tuple[str, list[str]]:
    """The version of transformers that the document is of, and the architectures that it names."""
    text = PATH.read_text(encoding="utf-8")
    version = re.search(r"transformers (\S+) and", text)
    assert version is not None
    return version[1], re.findall(r"^\| ([\w.-]+) \|", text.split("\n|---")[1], re.MULTILINE)


TEXT = """# Tested models

Every architecture that transformers {transformers} and torch {torch} name, {number} of them.

{counts}

| architecture | backend | calls | outcome |
|---|---|---|---|
{rows}
"""
