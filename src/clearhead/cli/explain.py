"""The command `clearhead explain`."""

from __future__ import annotations

import argparse

from clearhead.base.errors import ClearheadError, require
from clearhead.base.output.text import printable
from clearhead.base.output.written import ending_of
from clearhead.cli.texts import check_outputs, checked, layer_of, model_of, quoted, watched
from clearhead.explanation.examples import EXAMPLES, example
from clearhead.explanation.explanation import ENDINGS, WHAT, Explanation
from clearhead.models.recordings.calls import one_call
from clearhead.models.recordings.tokens import place_among


def run(options: argparse.Namespace) -> None:
    """`clearhead explain` with these options."""
    if options.output is not None:
        ending_of(options.output, ENDINGS, WHAT)
    check_outputs(options, {"-o": options.output})
    if options.text is not None:
        found = _of_text(options)
    elif options.example is not None:
        found = example(options.example, options.title, options.digits)
    else:
        print("\n".join(f"{name:16}{(make.__doc__ or '').splitlines()[0]}" for name, make in EXAMPLES.items()))
        print("Print one of them: clearhead explain NAME")
        print("As a page in which numbers can be changed: clearhead explain NAME -o page.html")
        return
    if options.output is None:
        require("rich.console", "terminal", "an explanation in a terminal").Console(highlight=False).print(found)
        return
    path = found.write(options.output)
    print(f"The explanation: {printable(str(path.resolve()))}")


def _of_text(options: argparse.Namespace) -> Explanation:
    if options.example is not None:
        raise ClearheadError(f"an example, {options.example!r:.60}, is given beside --text: pass one of the two.")
    if options.query is None:
        raise ClearheadError("--from is missing: the word of the text that looks, or its place.")
    text = checked(options.text)
    target = None if options.target is None else checked(options.target, "the target")
    model, tokenizer, _ = model_of(options, None if target is None else False)
    read = watched(model, tokenizer, text, target=target, values=True)
    number = one_call(read.recording.calls, layer_of(options.layer), options.step, "explain --layer")
    call = read.recording.calls[number]
    words, source = read.of(call)
    query = place(options.query, words, "--from")
    key = None if options.key is None else place(options.key, source or words, "--to")
    if read.said:
        print(f"In this call {read.said}: {quoted(read.answer or '') or 'no words'}")
    at = (0, options.head, query) if key is None else (0, options.head, query, key)
    return call.explain(at, tokens=words, source_tokens=source, title=options.title, digits=options.digits)


def place(word: str, tokens: list[str], name: str) -> int:
    """The place of a word among the tokens, or the given number itself."""
    found = place_among(word, tokens, name)
    if found is not None:
        return found
    if word.isascii() and word.isdecimal() and int(word) < len(tokens):
        return int(word)
    shown = " ".join(map(printable, tokens[:40])) + (" …" if len(tokens) > 40 else "")
    raise ClearheadError(
        f"{name} is {word!r:.60}, which is no token of the text: {shown}. Pass one, or its place from 0."
    )
