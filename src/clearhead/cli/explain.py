"""The command `clearhead explain`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from clearhead.base.errors import ClearheadError, require
from clearhead.base.pages import write_page
from clearhead.cli.texts import add_model, checked, model_of, watched
from clearhead.explanation.columns import printable
from clearhead.explanation.examples import EXAMPLES, example
from clearhead.explanation.explanation import Explanation

WRITTEN = {".html": "html", ".md": "markdown", ".py": "script"}  # what a file's name asks for


def add(commands: Any) -> None:
    """Add the command to those of the parser."""
    explain = commands.add_parser(
        "explain",
        help="show a computation of attention step by step: an example, or one query of a model that reads a text",
        description="Show how attention comes to its output, step by step, with formulas, shapes and numbers.",
        epilog="examples: " + ", ".join(EXAMPLES),
    )
    explain.add_argument("example", nargs="?", metavar="NAME", help="a built-in example; without it they are listed")
    explain.add_argument("--text", metavar="TEXT", help="let a model read this text, and explain one query of it")
    explain.add_argument("--layer", metavar="L", type=int, default=0, help="which attention call (default: 0)")
    explain.add_argument("--head", metavar="H", type=int, default=0, help="which head (default: 0)")
    explain.add_argument(
        "--from", dest="query", metavar="WORD", help="the word that looks: a token of the text, or its place"
    )
    explain.add_argument("--to", dest="key", metavar="WORD", help="the word that it looks at (default: any)")
    add_model(explain)
    explain.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write a page (.html), Markdown (.md) or a program (.py) instead",
    )
    explain.set_defaults(run=_explain)


def _explain(options: argparse.Namespace) -> None:
    if options.text is not None:
        found = _of_text(options)
    elif options.example is not None:
        found = example(options.example)
    else:
        print("\n".join(f"{name:16}{(make.__doc__ or '').splitlines()[0]}" for name, make in EXAMPLES.items()))
        print("Print one of them: clearhead explain NAME")
        return
    if options.output is None:
        require("rich.console", "terminal", "an explanation in a terminal").Console(highlight=False).print(found)
        return
    kind = WRITTEN.get(Path(options.output).suffix)
    if kind is None:
        raise ClearheadError(f"the output is {options.output!r:.80}; expected a file .html, .md or .py.")
    path = write_page(options.output, getattr(found, kind)(), "explanation")
    print(f"The explanation: {printable(str(path.resolve()))}")


def _of_text(options: argparse.Namespace) -> Explanation:
    if options.example is not None:
        raise ClearheadError(f"an example, {options.example!r:.60}, is given beside --text: pass one of the two.")
    if options.query is None:
        raise ClearheadError("--from is missing: the word of the text that looks, or its place.")
    model, tokenizer, _ = model_of(options)
    recording, tokens, _ = watched(model, tokenizer, checked(options.text), values=True)
    query = place(options.query, tokens, "--from")
    key = None if options.key is None else place(options.key, tokens, "--to")
    return recording.explain(options.layer, options.head, query, key, tokens=tokens)


def place(word: str, tokens: list[str], name: str) -> int:
    """The place of a word among the tokens, the first one; or the number itself."""
    plain = [token.removeprefix("##").strip("Ġ▁ ") for token in tokens]
    for known in (tokens, plain, [token.lower() for token in plain]):
        for wanted in (word, word.lower()):
            if wanted in known:
                return known.index(wanted)
    if word.isascii() and word.isdecimal() and int(word) < len(tokens):
        return int(word)
    shown = " ".join(map(printable, tokens[:40])) + (" …" if len(tokens) > 40 else "")
    raise ClearheadError(
        f"{name} is {word!r:.60}, which is no token of the text: {shown}. Pass one, or its place from 0."
    )
