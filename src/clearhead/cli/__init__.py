"""The command `clearhead`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn, TextIO

import clearhead
from clearhead.base.errors import ClearheadError
from clearhead.base.output.text import printable

AddParser = Callable[..., argparse.ArgumentParser]
MODEL = "a folder with a model and its tokenizer, both saved with save_pretrained() (default: a small BERT)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status.

    The status is 0 for success; 1 where the reader of its output has closed it, or where an audit has findings; 2 for
    a bad input, or an output that cannot be written, with one message on standard error and no traceback; 130 where it
    was interrupted. The process of
    the command itself ends by the signal (`base/output/ended.py`). A standard stream that was closed before the start
    is no error.
    """
    sys.stdout, sys.stderr = _opened(sys.stdout), _opened(sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal with fewer characters shows the others as \u…
            stream.reconfigure(errors="backslashreplace")
    status, message = _run(arguments)
    lost = _lost(sys.stdout, 1)
    if isinstance(lost, BrokenPipeError):
        status, message = 1, ""
    elif lost is not None:
        status, message = 2, f"cannot write to standard output: {lost.strerror or lost}"
    if message:
        with suppress(OSError):
            print("clearhead: " + "\n".join(map(printable, message.split("\n"))), file=sys.stderr)
    _lost(sys.stderr, 2)
    return status


def _run(arguments: Sequence[str] | None) -> tuple[int, str]:
    """Run the command. Returns the exit status, and the message of an error."""
    try:
        options = parser().parse_args(arguments)
        return import_module(f"clearhead.cli.{options.command}").run(options) or 0, ""
    except SystemExit as ended:  # argparse has printed the reason; rich exits where the reader has closed the output
        return ended.code if isinstance(ended.code, int) else 0, ""
    except ClearheadError as error:
        return 2, str(error)
    except BrokenPipeError:
        return 1, ""
    except KeyboardInterrupt:
        return 130, "interrupted"
    except (OSError, RecursionError, MemoryError) as error:  # a disk that is full, a file nested too deeply
        return 2, f"{type(error).__name__}: {error!s:.200}"


def _opened(stream: TextIO | None) -> TextIO:
    """The stream, or where it was closed before the start, a stream that drops all text.

    The new stream takes the number of the closed one, which the next opened file would otherwise get.
    """
    return open(os.devnull, "w", encoding="utf-8") if stream is None else stream


def _lost(stream: TextIO, number: int) -> OSError | None:
    """The error where printed text cannot be written, or None. After an error Python does not try again at its end."""
    try:
        stream.flush()
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
        return error
    return None


def parser() -> argparse.ArgumentParser:
    """The parser of all options. A command's code is imported when the command runs, so --help does not wait for it."""
    does = "Look into attention, and into the attention of a model."
    whole = argparse.ArgumentParser(prog="clearhead", description=does)
    whole.add_argument("--version", action=_Versions, nargs=0, help="show versions, kernels and engines, and exit")
    commands = whole.add_subparsers(dest="command", required=True)
    for describe in (_report, _explain, _survey, _audit):
        describe(commands.add_parser)
    return whole


class _Versions(argparse.Action):
    """Prints what `clearhead.show_versions` prints."""

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> NoReturn:
        clearhead.show_versions()
        parser.exit()


def _report(add_parser: AddParser) -> None:
    command = add_parser(
        "report",
        help="watch a model read a text, and write a page that shows its attention",
        description="Watch a model read a text; print a summary, and write a self-contained HTML page.",
    )
    add = command.add_argument
    text = command.add_mutually_exclusive_group()
    text.add_argument("text", nargs="?", metavar="TEXT", help="the text to read; - reads it from standard input")
    text.add_argument("--file", metavar="F", help="a file that holds the text")
    add("--model", metavar="DIR", help=MODEL)
    add(
        "--layers",
        metavar="LIST",
        help="which layers to keep in the page, by number, range, name or pattern, such as 0,5-7,-1, "
        "'decoder 1, cross' or 'decoder.*' (default: all)",
    )
    add("--heads", metavar="LIST", help="which heads to keep, such as 0-3,7,-1 (default: all)")
    add(
        "--layer",
        metavar="L",
        help="open the page on this layer, by number or name, such as 'decoder 1, cross' (default: the first layer "
        "with --head; else the layer of the head that departs most from uniform attention)",
    )
    add("--head", metavar="H", type=int, help="open the page on this head (default: with --layer the first head)")
    generate = "let the model go on for at most N tokens, each its likeliest, and show the text with its answer"
    add("--generate", metavar="N", type=int, help=generate)
    target = "the text for the decoder of an encoder-decoder (default: the text that the model generates)"
    add("--target", metavar="TEXT", help=target)
    add("--beside", metavar="TEXT", help="another text, to compare each head on the two")
    add("-o", "--output", metavar="FILE", default="report.html", help="the page (default: %(default)s)")


def _explain(add_parser: AddParser) -> None:
    command = add_parser(
        "explain",
        help="show a computation of attention step by step: an example, or one query of a model that reads a text",
        description="Show how attention comes to its output, step by step, with formulas, shapes and numbers; or, "
        "with -o page.html, write a page in which the numbers can be changed, and all steps follow.",
    )
    add = command.add_argument
    add("example", nargs="?", metavar="NAME", help="a built-in example; without it they are listed")
    add("--text", metavar="TEXT", help="let a model read this text, and explain one query of it")
    layer = "which layer, by number or name, such as 'decoder 1, cross' (default: 0)"
    add("--layer", metavar="L", default="0", help=layer)
    add("--step", metavar="N", type=int, help="which step, where the layer made several calls")
    add("--head", metavar="H", type=int, default=0, help="which head (default: 0)")
    add("--from", dest="query", metavar="WORD", help="the word that looks: a token of the text, or its place")
    add("--to", dest="key", metavar="WORD", help="the word that it looks at (default: any)")
    add("--target", metavar="TEXT", help="the text for the decoder of an encoder-decoder, as for report")
    add("--title", metavar="TEXT", help="the title of the explanation (default: what is computed)")
    add("--digits", metavar="N", type=int, help="with how many digits numbers are written (default: 4)")
    add("--model", metavar="DIR", help=MODEL)
    add(
        "-o",
        "--output",
        metavar="FILE",
        help="write a page (.html), Markdown (.md), a program (.py) or a notebook (.ipynb) instead",
    )


def _survey(add_parser: AddParser) -> None:
    command = add_parser(
        "survey",
        help="statistics of every head of a model over many texts",
        description="Let a model read many texts; write a table of its heads, and perhaps a page. Under torchrun "
        "each process takes its part; a survey that was stopped continues from its --state.",
    )
    add = command.add_argument
    add("--file", metavar="F", required=True, help="the texts: .jsonl, an object a line, or a text a line")
    add("--field", metavar="NAME", default="text", help="the text's name in .jsonl (default: text)")
    add("--model", metavar="DIR", help=MODEL)
    add("--state", metavar="DIR", help="a folder for the results so far; needed for several processes")
    add("-o", "--output", metavar="FILE", default="survey.csv", help="the table, CSV (default: %(default)s)")
    add("--page", metavar="FILE", help="also write a page that shows the heads (.html)")
    add(
        "--keep",
        metavar="LIST",
        help="measures, such as 'sink,first,word classes' (default: normalised entropy, first, sink, previous, "
        "distance, word classes)",
    )
    add("--batch", metavar="N", type=int, default=4096, help="tokens of one pass of the model (default: %(default)s)")
    add("--max-length", metavar="N", type=int, help="cut texts at N tokens (default: the model's most)")
    wait = "how many seconds to wait for a file of another process (default: %(default)g)"
    add("--wait", metavar="S", type=float, default=600.0, help=wait)


def _audit(add_parser: AddParser) -> None:
    command = add_parser(
        "audit",
        help="test whether a model attends as expected, whatever computes its attention",
        description="Run a model on texts, change some of the ids, and test that the outputs depend on what they may. "
        "The exit status is 0 where every test holds, 1 where there is a finding, 2 where the audit could not run.",
    )
    add = command.add_argument
    add("--text", metavar="TEXT", action="append", required=True, help="a text; several make a batch")
    add("--model", metavar="DIR", help=MODEL)
    add("--packed", action="store_true", help="pack the texts into one sequence, with positions that restart")
    masks = "the expected mask: causal or full (default: causal for models that generate)"
    add("--mask", choices=["causal", "full"], help=masks)
    add("--window", metavar="N", type=int, help="a sliding window: each query sees N keys, itself with them")
    add("--max-length", metavar="N", type=int, default=128, help="cut each text to N tokens (default: %(default)s)")
    levels = "which tests: outputs, layers or all (default: %(default)s)"
    add("--level", choices=["outputs", "layers", "all"], default="layers", help=levels)
    add("--seed", metavar="N", type=int, default=0, help="of the changes (default: %(default)s)")
    add("--json", action="store_true", help="print the report as JSON")
